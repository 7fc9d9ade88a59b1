"""Native core: virtual-memory backends, extent tables and the block pool.

Every call that works on memory gives up the GIL, returns failures as an :class:`Outcome` and never aborts. The
calls of :class:`BlockPool` take microseconds and keep the GIL. ``native/README.md`` tells how it works.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Run = tuple[int, int, int]

class Status(IntEnum):
    """What a call that touches memory answered."""

    OK = 0
    OUT_OF_MEMORY = 1
    """The card has no memory for this now; an ordinary miss."""
    INVALID_ARGUMENT = 2
    """The request contradicts what is reserved, held or mapped; nothing was done."""
    DRIVER_ERROR = 3
    """Anything else that the driver or the kernel refused."""
    INJECTED = 4
    """A :class:`FaultHook` made the call fail; the driver was not asked."""

class Counters:
    """What a device has done so far, and what is alive now. A copy, taken at one moment.

    Attributes:
        handles_created: physical allocations made.
        handles_released: physical allocations given back.
        bytes_created: bytes of the allocations alive now.
        bytes_mapped: bytes mapped now.
        reservations: address ranges reserved now.
        maps: mappings made.
        unmaps: mappings removed.
        accesses: mappings made readable and writable.
        fills: fills queued.
    """

    @property
    def handles_created(self) -> int: ...
    @property
    def handles_released(self) -> int: ...
    @property
    def bytes_created(self) -> int: ...
    @property
    def bytes_mapped(self) -> int: ...
    @property
    def reservations(self) -> int: ...
    @property
    def maps(self) -> int: ...
    @property
    def unmaps(self) -> int: ...
    @property
    def accesses(self) -> int: ...
    @property
    def fills(self) -> int: ...

class FaultHook:
    """Makes chosen calls of a device fail or take longer. Costs one relaxed load per call while nothing is armed.

    Threads: any.
    """

    def arm(self, call: str, nth: int, count: int = 1, delay_us: int = 0, fail: bool = True) -> None:
        """Hit ``count`` consecutive calls, beginning with the ``nth`` from now. Several faults may be armed.

        Args:
            call: one of reserve, create, map, access, fill, unmap, release.
            nth: first call to hit, counted from arming, 1-based.
            count: how many calls to hit.
            delay_us: microseconds that a hit call takes longer.
            fail: whether a hit call fails without reaching the driver (status ``INJECTED``).

        Raises:
            ValueError: unknown call, or a number out of range.
        """

    def clear(self) -> None:
        """Disarm everything. The totals stay."""

    def hits(self) -> dict[str, int]:
        """Calls that were hit, by name, since the device was made."""

    def seen(self) -> dict[str, int]:
        """Calls that came by while something was armed, by name, since the device was made."""

class Device:
    """One card. Made as :class:`HostDevice` or :class:`CudaDevice`.

    Threads: any. Not usable in a forked child: calls there are refused.
    """

    @property
    def granule_bytes(self) -> int:
        """Unit of physical memory and of mappings, in bytes."""

    @property
    def kind(self) -> str:
        """``"host"`` or ``"cuda"``."""

    @property
    def ordinal(self) -> int:
        """Index among the CUDA devices visible to this process; 0 on the host."""

    @property
    def card_id(self) -> str:
        """Names the physical card: the PCI bus id, or what the host device was given."""

    @property
    def private(self) -> bool:
        """Whether no other device object, in any process, can use this card's memory."""

    @property
    def faults(self) -> FaultHook:
        """The fault hook of this device."""

    def total_bytes(self) -> int:
        """Physical memory of the card.

        Raises:
            RuntimeError: the driver cannot say.
        """

    def free_bytes(self) -> int:
        """Physical memory that is free now, whoever uses the rest.

        Raises:
            RuntimeError: the driver cannot say, or a shared card file was locked for more than a second.
        """

    def counters(self) -> Counters:
        """A copy of the counters."""

class HostDevice(Device):
    """A card of host memory with the rules of the CUDA driver: a memfd, committed and given back for real.

    Args:
        capacity_bytes: memory of the card; a create beyond it is out of memory.
        granule_bytes: power of two, at least the kernel's page (4096).
        card: what ``card_id`` shall be; by default the card file, or an id of this device alone.
        card_file: path of a small shared file. Devices that name the same one, in any process, share the capacity;
            what a dead process held is free again.

    Raises:
        ValueError: a number is out of range, or the card file is unusable or used with another capacity.
    """

    def __init__(
        self, capacity_bytes: int, granule_bytes: int = 2 << 20, card: str = "", card_file: str = ""
    ) -> None: ...
    def resident_bytes(self) -> int:
        """Bytes that the kernel has committed for this device.

        Source: ``st_blocks`` of the memfd.
        """

class CudaDevice(Device):
    """A CUDA card. Retains its primary context, the one that torch uses.

    Args:
        ordinal: index among the devices visible to this process.

    Raises:
        RuntimeError: no driver, no such device, or one without virtual-memory management.
    """

    def __init__(self, ordinal: int) -> None: ...

def cuda_available() -> tuple[bool, str]:
    """Whether a :class:`CudaDevice` can be made here, and if not, why.

    Blocks: the first call initialises the driver, up to seconds.
    """

class PoolGeometry:
    """Where the bytes of a pool lie in its address reservation.

    Args:
        name: of the pool, for messages.
        domain: index of the id space whose pages the pool follows.
        pages: pages of the domain; equal in all pools of one domain.
        reservation_bytes: length of the address range; 0 for a stage without layers of the family.
        lanes: (base offset, bytes per page), one per layer, buffer and bank. Page p lies at base + p * bytes.
        pinned: (offset, bytes) that are always backed; they belong to whichever run contains page 0.
        fill: (offset in a fill row, bytes, 32-bit little-endian pattern). Empty: fresh memory is left as it is.
        fill_row_bytes: length of the row, which is repeated through every page and every pinned range, starting
            anew at each of them; the last row is cut off.

    Raises:
        ValueError: ranges that overlap or leave the reservation, or a fill that does not fit its row. A pattern of
            different bytes needs offsets, lengths and strides that are multiples of 4.
    """

    def __init__(
        self,
        *,
        name: str,
        domain: int,
        pages: int,
        reservation_bytes: int,
        lanes: Sequence[tuple[int, int]],
        pinned: Sequence[tuple[int, int]] = (),
        fill: Sequence[tuple[int, int, int]] = (),
        fill_row_bytes: int = 0,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def domain(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def reservation_bytes(self) -> int: ...
    @property
    def lanes(self) -> list[tuple[int, int]]: ...
    @property
    def pinned(self) -> list[tuple[int, int]]: ...
    @property
    def fill(self) -> list[tuple[int, int, int]]: ...
    @property
    def fill_row_bytes(self) -> int: ...

class Outcome:
    """What a call of :class:`Backing` did. A failure is a value; the protocol decides what it means.

    Attributes:
        ok: everything was done.
        status: of the first refused call.
        exhausted: the card has no memory for this now (an injected refusal of create stands for one).
        call: the first refused call: create, map, access, fill, unmap or release; empty if ok.
        pool: index of the pool it was for, -1 if none is to blame.
        offset: of the extent in the pool's reservation, in bytes.
        bytes: of the extent.
        code: the driver's or the kernel's own number.
        detail: the failure in words, naming pool, call and cause; empty if ok.
        handles_created: per pool, physical allocations made by this call (also those it gave back again).
        micros: how long the call took.
    """

    @property
    def ok(self) -> bool: ...
    @property
    def status(self) -> Status: ...
    @property
    def exhausted(self) -> bool: ...
    @property
    def call(self) -> str: ...
    @property
    def pool(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def code(self) -> int: ...
    @property
    def detail(self) -> str: ...
    @property
    def handles_created(self) -> list[int]: ...
    @property
    def micros(self) -> int: ...

class Backing:
    """The address reservations of a rank's pools, and the physical memory behind runs of pages.

    A run is a tuple (domain, first page, count). It is known by exactly these numbers from ``reserve`` until
    ``release``. A call that names a page outside the pools, or a run that overlaps another one, is refused with
    ``INVALID_ARGUMENT`` before anything is touched. All calls are idempotent.

    Args:
        device: the card.
        pools: geometry of each pool; the index in this list names a pool from then on.
        extent_bytes_max: an interior longer than this is cut into several extents.

    Raises:
        ValueError: pools that contradict one another.
        RuntimeError: the addresses cannot be reserved.

    Threads: any; one call works at a time, while ``held``, ``held_bytes`` and ``mapped_bytes`` never wait.
    Blocks: for the driver calls, microseconds to tens of microseconds per extent on CUDA; the GIL is given up.
    """

    def __init__(self, device: Device, pools: Sequence[PoolGeometry], *, extent_bytes_max: int = 1 << 30) -> None: ...
    def plan(self, runs: Sequence[_Run]) -> list[tuple[int, int]]:
        """Per pool, (handles, bytes) that ``reserve(runs)`` would have to create now. Touches nothing.

        Raises:
            ValueError: runs that ``reserve`` would refuse.
        """

    def reserve(self, txn: int, runs: Sequence[_Run]) -> Outcome:
        """Create the handles that are missing for these runs. On failure everything this call created is given back.

        Args:
            txn: transaction that takes the handles; ``abort(txn)`` gives exactly these back.
            runs: what to hold. Runs that are held already stay as they are.
        """

    def abort(self, txn: int) -> Outcome:
        """Release what ``txn`` took and what is not mapped."""

    def map(self, runs: Sequence[_Run]) -> Outcome:
        """Map what is not mapped, grant access, fill the runs' own bytes and wait until they are filled.

        On failure what is mapped stays mapped; the same call continues where it stopped.
        """

    def unmap(self, runs: Sequence[_Run]) -> Outcome:
        """Unmap whole extents and keep the handles. A border granule goes only with its last mapped run.

        On failure it stops there; ``restore`` repairs. The caller has waited for work that may touch the runs.
        Source: ``cuMemUnmap`` does not synchronise.
        """

    def restore(self, runs: Sequence[_Run]) -> Outcome:
        """Map again what an unmap has taken away, and fill the runs again. The same work as ``map``."""

    def release(self, runs: Sequence[_Run]) -> Outcome:
        """Release the handles that no other run holds; refused with ``INVALID_ARGUMENT`` while a run is mapped.

        A handle that the driver does not take back stays in the count and is tried again by the same call.
        """

    def held(self) -> list[int]:
        """Per pool, live handles."""

    def held_bytes(self) -> list[int]:
        """Per pool, bytes of live handles."""

    def mapped_bytes(self) -> list[int]:
        """Per pool, bytes mapped."""

    def base(self, pool: int) -> int:
        """Address of the pool's reservation, a multiple of the granule; 0 if it has no bytes.

        Raises:
            IndexError: no such pool.
        """

    def array(self, pool: int) -> Any:
        """The whole reservation as uint8, one dimension, for ``torch.from_dlpack``; zero copy.

        Keeps this object alive. Touching bytes of a run that is not mapped faults.

        Raises:
            IndexError: no such pool.
        """

    def extents(self, pool: int) -> list[tuple[int, int, str, int]]:
        """For tests: (offset, bytes, state, runs that hold it) of the extents that have a handle, by offset.

        State is ``held``, ``mapped``, or ``no_access`` where the mapping was made and access was refused.
        """

    def close(self) -> None:
        """Unmap, release and free the addresses, in this order. Idempotent, never raises.

        While arrays of a pool exist its addresses stay reserved (without memory), so that nobody else gets them.
        """

class BlockPool:
    """Hands out block ids as a pure function of the operations so far, hence equally on every rank.

    A block comes from the fullest page that has a free one (ties: the lowest page), the lowest id in it first.

    Args:
        pages: pages of the domain; none is published at first.
        blocks_per_page: blocks in a page.

    Raises:
        ValueError: a number is out of range.

    Threads: one, or several under the GIL, which is kept: calls take microseconds.
    """

    def __init__(self, pages: int, blocks_per_page: int) -> None: ...
    def publish(self, first_page: int, count: int) -> None:
        """Make the blocks of these pages available.

        Raises:
            ValueError: outside the pool, or published already; nothing was published.
        """

    def retire(self, first_page: int, count: int) -> None:
        """Take these pages away again.

        Raises:
            ValueError: unless all of them are published and entirely free; nothing was retired.
        """

    def run_is_free(self, first_page: int, count: int) -> bool:
        """Whether all these pages are published and entirely free.

        Raises:
            ValueError: outside the pool.
        """

    def sort(self) -> None:
        """Nothing to do: the order of hand-out depends only on which blocks are free."""

    def available(self) -> int:
        """Free blocks in published pages."""

    def published(self) -> int:
        """Blocks in published pages, free or not."""

    def alloc(self, n: int) -> NDArray[np.int64] | None:
        """Take ``n`` blocks, or ``None`` and nothing taken if fewer are available.

        Returns:
            Ids in the order of hand-out, int64[n].

        Raises:
            ValueError: ``n`` is negative.
        """

    def free(self, ids: NDArray[np.int64]) -> None:
        """Give blocks back. Takes any one-dimensional contiguous int64 array in host memory.

        Raises:
            ValueError: an id is out of range, not published, free, or named twice; nothing was freed.
        """

    def free_at(self, address: int, count: int) -> None:
        """The same for ``count`` int64 ids at an address, which the caller vouches for: a tensor converts slower.

        Raises:
            ValueError: as :meth:`free`.
        """

    def pin(self, block: int) -> None:
        """Never take this block back: naming it in ``free`` is an error. One block per pool.

        Raises:
            ValueError: the block is not in use.
        """

    @property
    def ids_digest(self) -> int:
        """32 bits that depend on the ids of the last successful ``alloc`` or ``free`` and on their order."""

    def reset(self) -> None:
        """Make every block of the published pages free again."""

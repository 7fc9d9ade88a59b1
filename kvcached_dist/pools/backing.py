"""The memory of one rank: specs on one side, the native backing on the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.utils.dlpack import from_dlpack

from .. import _native
from ..coord.core.errors import DriverError
from ..coord.core.types import Run, Txn
from . import tensors
from .geometry import geometry_of
from .layout import PoolLayout, runs_bytes, stage_layout
from .specs import StageSpec
from .validate import check_page_size


class StageBacking:
    """Backs page runs of a stage with physical memory, in every local pool and layer.

    A thin face: the extent tables and all driver calls live in native code, which releases the GIL. Driver
    failures are values (:class:`_native.Outcome`), never exceptions; only :meth:`open` raises.

    Threads: :meth:`plan` to :meth:`release` belong to the agent's worker thread. Views and the counters may
    be read from any thread. Blocks: as long as the driver calls take; an extent costs tens of microseconds.

    Args:
        device: where memory comes from.
        stage: what this rank holds.
        layouts: the stage's pools, placed with the device's granule.
        native: backing over these pools.
    """

    def __init__(
        self, device: _native.Device, stage: StageSpec, layouts: Sequence[PoolLayout], native: _native.Backing
    ) -> None:
        self.device = device
        self.stage = stage
        self.layouts = tuple(layouts)
        self.native = native
        self._storage: dict[int, torch.Tensor] = {}

    @classmethod
    def open(cls, device: _native.Device, stage: StageSpec, page_bytes: int | None = None) -> StageBacking:
        """Reserve addresses for all pools of a stage. Takes no physical memory.

        Args:
            device: where memory comes from.
            stage: what this rank holds.
            page_bytes: ``KVCACHED_PAGE_SIZE_MB`` in bytes, where blocks must not be larger than it; None: any.

        Raises:
            ConfigError: a block is larger than ``page_bytes``.
            DriverError: the addresses cannot be reserved.
        """
        if page_bytes is not None:
            check_page_size(stage, page_bytes)
        layouts = stage_layout(stage, device.granule_bytes)
        try:
            native = _native.Backing(device, [geometry_of(layout) for layout in layouts])
        except RuntimeError as error:
            size = sum(layout.reservation_bytes for layout in layouts)
            raise DriverError(f"card {device.card_id}: cannot reserve {size} bytes of addresses: {error}") from error
        return cls(device, stage, layouts, native)

    def plan(self, runs: Iterable[Run]) -> list[tuple[int, int]]:
        """Per pool: missing handles and missing bytes for these runs now. Touches nothing."""
        return self.native.plan(_triples(runs))

    def missing_bytes(self, runs: Iterable[Run]) -> int:
        """Physical bytes that are missing for these runs now, over all pools. Touches nothing."""
        return sum(missing for _, missing in self.plan(runs))

    def reserve(self, txn: Txn, runs: Iterable[Run]) -> _native.Outcome:
        """Create the missing physical handles; no address is touched. A failure has given everything back."""
        return self.native.reserve(txn, _triples(runs))

    def abort(self, txn: Txn) -> _native.Outcome:
        """Release handles that ``txn`` created and that are not mapped. Idempotent."""
        return self.native.abort(txn)

    def map(self, runs: Iterable[Run]) -> _native.Outcome:
        """Map, set access and fill. Idempotent; what a failed call has mapped stays mapped."""
        return self.native.map(_triples(runs))

    def unmap(self, runs: Iterable[Run]) -> _native.Outcome:
        """Unmap whole extents and keep the handles; granules that other runs use stay mapped."""
        return self.native.unmap(_triples(runs))

    def restore(self, runs: Iterable[Run]) -> _native.Outcome:
        """Map again what a failed unmap took away, and fill. Idempotent."""
        return self.native.restore(_triples(runs))

    def release(self, runs: Iterable[Run]) -> _native.Outcome:
        """Release handles that no other run holds. Idempotent."""
        return self.native.release(_triples(runs))

    def held(self) -> list[int]:
        """Physical handles held now, per pool in the stage's order."""
        return self.native.held()

    def held_bytes(self) -> list[int]:
        """Bytes of these handles, per pool in the stage's order: the physical memory that this rank owns."""
        return self.native.held_bytes()

    def mapped_bytes(self) -> list[int]:
        """Mapped bytes in whole granules, per pool in the stage's order."""
        return self.native.mapped_bytes()

    def pool_name(self, index: int) -> str:
        """Name of a pool by its number in an outcome; ``-`` where the outcome concerns no pool."""
        return self.stage.pools[index].name if 0 <= index < len(self.stage.pools) else "-"

    def page_bytes(self, domain: str) -> int:
        """Bytes of one page of a domain over all local pools, without rounding: for budgets."""
        return self.stage.page_bytes(domain)

    def expected_bytes(self, runs: Iterable[Run]) -> dict[str, int]:
        """Bytes that back exactly these runs, per pool: whole granules, shared ones once, pinned rows included."""
        wanted, granule = _triples(runs), self.device.granule_bytes
        return {layout.pool.name: runs_bytes(layout, wanted, granule) for layout in self.layouts}

    def tensor(self, pool: str, bank: int = 0) -> torch.Tensor:
        """All blocks of a pool as bytes, without a copy.

        Args:
            pool: name of the pool.
            bank: which bank of every buffer.

        Returns:
            uint8 ``[layers * buffers, blocks, block_bytes]``; no rows where the stage has no layers of the pool.

        Raises:
            ConfigError: the pool or the bank does not exist.
        """
        index = self.stage.pool_index(pool)
        blocks = self.stage.blocks(self.stage.pools[index])
        return tensors.pool_bytes(self._reservation(index), self.layouts[index], blocks, bank)

    def lanes(self, domain: str) -> list[torch.Tensor]:
        """Everything that the ids of a domain index, without a copy.

        Args:
            domain: name of the domain.

        Returns:
            For every buffer and bank of its pools on this stage: uint8 ``[blocks, block_bytes]``.
        """
        pools = [pool for pool in self.stage.pools if pool.domain == domain]
        return [lane for pool in pools for bank in range(pool.banks) for lane in self.tensor(pool.name, bank)]

    def layer(
        self,
        pool: str,
        index: int,
        dtype: str | None = None,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """One layer buffer; without further arguments exactly as the engine would have allocated it.

        Args:
            pool: name of the pool.
            index: ``local layer * buffers_per_layer + buffer``.
            dtype: torch name of the element type; None: the native one.
            shape: shape in elements; None: the native one, all banks and tails included.
            strides: strides in elements; None: contiguous.

        Raises:
            ConfigError: the buffer does not exist here, or the view would leave it.
        """
        number = self.stage.pool_index(pool)
        spec = self.stage.pools[number]
        shape = spec.native_shape(self.stage.blocks(spec)) if shape is None else tuple(shape)
        if strides is None:
            strides = contiguous_strides(shape)
        storage = self._reservation(number)
        return tensors.buffer_view(storage, self.layouts[number], index, dtype or spec.dtype, shape, strides)

    def layers(self, pool: str, buffer: int = 0) -> torch.Tensor:
        """One native buffer of every local layer as a single tensor ``[layers, *native_shape]``.

        Args:
            pool: name of the pool.
            buffer: which buffer of a layer (K, V).

        Raises:
            ConfigError: the pool or the buffer does not exist.
        """
        number = self.stage.pool_index(pool)
        blocks = self.stage.blocks(self.stage.pools[number])
        return tensors.stacked_view(self._reservation(number), self.layouts[number], blocks, buffer)

    def close(self) -> None:
        """Unmap, release, free the addresses. Idempotent. Views must not be used afterwards."""
        self._storage.clear()
        self.native.close()

    def _reservation(self, index: int) -> torch.Tensor:
        if index not in self._storage:
            if self.layouts[index].reservation_bytes:
                self._storage[index] = from_dlpack(self.native.array(index))
            else:
                where = f"cuda:{self.device.ordinal}" if self.device.kind == "cuda" else "cpu"
                self._storage[index] = torch.empty(0, dtype=torch.uint8, device=where)
        return self._storage[index]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
    return tuple(strides)


def _triples(runs: Iterable[Run]) -> list[tuple[int, int, int]]:
    return [(run.domain, run.first, run.count) for run in runs]

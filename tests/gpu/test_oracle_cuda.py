"""The native core against the driver's own word, asked through cuda-python."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import torch

from kvcached_dist._native import Backing, CudaDevice, PoolGeometry, cuda_available
from tests.gpu import oracle

usable, reason = cuda_available()
pytestmark = pytest.mark.skipif(not usable, reason=reason)

PAGE_BYTES = 149_760
"""Divides no granule: neighbouring runs share border granules."""

PAGES = 512
PATTERN = 0xFF80_0000


@pytest.fixture
def device() -> CudaDevice:
    torch.zeros(1, device="cuda:0")
    return CudaDevice(0)


@pytest.fixture
def backing(device: CudaDevice) -> Iterator[Backing]:
    """One pool of two layers on card 0."""
    lane_bytes = PAGES * PAGE_BYTES
    pool = PoolGeometry(
        name="pool", domain=0, pages=PAGES, reservation_bytes=2 * lane_bytes,
        lanes=[(0, PAGE_BYTES), (lane_bytes, PAGE_BYTES)], pinned=[], fill=[(0, 4, PATTERN)], fill_row_bytes=4,
    )  # fmt: skip
    made = Backing(device, [pool])
    yield made
    made.close()


def mapped_granules(backing: Backing) -> set[int]:
    """Offsets of the granules where the driver says that memory of card 0 is mapped, and card 0 may write."""
    base, size = backing.base(0), 2 * PAGES * PAGE_BYTES
    found = set()
    for offset in range(0, size, CudaDevice(0).granule_bytes):
        home, writable = oracle.home_of(base + offset), oracle.is_writable(base + offset, 0)
        assert writable == (home is not None)
        assert home in (None, 0)
        if home is not None:
            found.add(offset)
    return found


def granules(*byte_ranges: tuple[int, int]) -> set[int]:
    """Offsets of the granules that these bytes touch."""
    granule = CudaDevice(0).granule_bytes
    return {
        offset
        for start, end in byte_ranges
        for offset in range(start // granule * granule, end, granule)
    }  # fmt: skip


def bytes_of(first: int, count: int) -> list[tuple[int, int]]:
    """The bytes of a run of pages, in both layers."""
    return [
        (lane * PAGES * PAGE_BYTES + first * PAGE_BYTES, lane * PAGES * PAGE_BYTES + (first + count) * PAGE_BYTES)
        for lane in range(2)
    ]


def test_the_card_is_what_the_driver_says(device: CudaDevice) -> None:
    assert device.granule_bytes == oracle.granule_bytes(0)
    assert (device.free_bytes(), device.total_bytes()) == oracle.memory()


def test_exactly_the_granules_of_mapped_runs_are_mapped_and_writable(backing: Backing) -> None:
    one, two = (0, 3, 20), (0, 23, 5)  # neighbours: they share a border granule in each layer
    assert mapped_granules(backing) == set()
    assert backing.reserve(1, [one, two]).ok
    assert mapped_granules(backing) == set(), "created is not mapped"
    assert backing.map([one, two]).ok
    assert mapped_granules(backing) == granules(*bytes_of(3, 20), *bytes_of(23, 5))
    assert backing.unmap([one]).ok
    assert mapped_granules(backing) == granules(*bytes_of(23, 5)), "the shared granule has to stay"
    assert backing.map([one]).ok
    assert mapped_granules(backing) == granules(*bytes_of(3, 20), *bytes_of(23, 5))
    assert backing.unmap([one, two]).ok
    assert mapped_granules(backing) == set()
    assert backing.release([one, two]).ok


def test_the_driver_counts_the_same_bytes(backing: Backing) -> None:
    free, _ = oracle.memory()
    run = (0, 0, 200)
    assert backing.reserve(1, [run]).ok
    held = len(granules(*bytes_of(0, 200))) * CudaDevice(0).granule_bytes
    assert (backing.held_bytes()[0], free - oracle.memory()[0]) == (held, held)
    assert backing.map([run]).ok
    assert free - oracle.memory()[0] == held
    assert backing.unmap([run]).ok
    assert free - oracle.memory()[0] == held
    assert backing.release([run]).ok
    assert oracle.memory()[0] == free


def test_a_refused_create_leaves_the_driver_as_it_was(device: CudaDevice, backing: Backing) -> None:
    assert backing.reserve(1, [(0, 0, 10)]).ok
    assert backing.map([(0, 0, 10)]).ok
    free, before = oracle.memory()[0], mapped_granules(backing)
    device.faults.arm("create", nth=3)
    assert not backing.reserve(2, [(0, 100, 200)]).ok
    assert (oracle.memory()[0], mapped_granules(backing)) == (free, before)


def test_fresh_pages_hold_the_pattern_by_the_drivers_own_copy(backing: Backing) -> None:
    assert backing.reserve(1, [(0, 7, 2)]).ok
    assert backing.map([(0, 7, 2)]).ok
    wanted = struct.pack("<I", PATTERN) * (2 * PAGE_BYTES // 4)
    for start, _ in bytes_of(7, 2):
        assert oracle.read(backing.base(0) + start, 2 * PAGE_BYTES) == wanted

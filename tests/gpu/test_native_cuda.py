"""The native core on a real card: what HostDevice promises has to hold for the driver as well."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from kvcached_dist._native import Backing, CudaDevice, PoolGeometry, Status, cuda_available

usable, reason = cuda_available()
pytestmark = pytest.mark.skipif(not usable, reason=reason)

PAGE_BYTES = 149_760
PAGES = 512
ROW = 32


def pools() -> list[PoolGeometry]:
    """Two layers whose pages do not divide the granule, with a pattern; and one plain pool of another domain."""
    lane_bytes = PAGES * PAGE_BYTES
    patterned = PoolGeometry(
        name="patterned",
        domain=0,
        pages=PAGES,
        reservation_bytes=2 * lane_bytes + 4096,
        lanes=[(0, PAGE_BYTES), (lane_bytes, PAGE_BYTES)],
        pinned=[(2 * lane_bytes, 4096)],
        fill=[(0, 8, 0xFF800000), (8, 24, 0)],
        fill_row_bytes=ROW,
    )
    plain = PoolGeometry(name="plain", domain=1, pages=64, reservation_bytes=64 << 21, lanes=[(0, 2 << 20)])
    return [patterned, plain]


@pytest.fixture
def device() -> CudaDevice:
    torch.zeros(1, device="cuda")  # torch's own context and allocator are there first, as in an engine
    return CudaDevice(0)


@pytest.fixture
def backing(device: CudaDevice) -> Iterator[Backing]:
    made = Backing(device, pools())
    yield made
    made.close()
    counters = device.counters()
    assert counters.handles_created == counters.handles_released
    assert (counters.bytes_created, counters.bytes_mapped) == (0, 0)


def tensor(backing: Backing, index: int) -> Any:
    return from_dlpack(backing.array(index))


def grow(backing: Backing, txn: int, *runs: tuple[int, int, int]) -> None:
    for outcome in (backing.reserve(txn, runs), backing.map(runs)):
        assert outcome.ok, outcome


def pages(memory: Any, first: int, count: int, lane: int = 0) -> Any:
    start = lane * PAGES * PAGE_BYTES + first * PAGE_BYTES
    return memory[start : start + count * PAGE_BYTES]


def is_pattern(memory: Any) -> bool:
    row = torch.tensor([0, 0, 128, 255] * 2 + [0] * 24, dtype=torch.uint8, device="cuda")
    return bool((memory.reshape(-1, ROW) == row).all())


def test_the_card_is_known(device: CudaDevice) -> None:
    assert (device.kind, device.ordinal) == ("cuda", 0)
    assert device.granule_bytes >= 1 << 16
    assert device.total_bytes() == torch.cuda.get_device_properties(0).total_memory
    assert 0 < device.free_bytes() < device.total_bytes()
    assert device.card_id.count(":") == 2
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_DEVICE"):
        CudaDevice(1000)


def test_memory_is_usable_by_torch_filled_and_given_back(device: CudaDevice, backing: Backing) -> None:
    run = (0, 0, 100)
    free = device.free_bytes()
    assert backing.reserve(1, [run]).ok
    held = backing.held_bytes()[0]
    assert free - device.free_bytes() == held
    assert backing.map([run]).ok
    memory = tensor(backing, 0)
    assert (memory.device, memory.dtype, memory.data_ptr()) == (torch.device("cuda:0"), torch.uint8, backing.base(0))
    for lane in range(2):
        assert is_pattern(pages(memory, 0, 100, lane))
    assert is_pattern(memory[-4096:])
    view = memory[: 100 * PAGE_BYTES].view(torch.float32)
    view.copy_(torch.arange(len(view), device="cuda", dtype=torch.float32))
    assert float(view[12345]) == 12345.0
    torch.cuda.synchronize()
    free = device.free_bytes()  # again: torch has taken memory of its own meanwhile
    assert backing.unmap([run]).ok
    assert device.free_bytes() == free
    assert backing.release([run]).ok
    assert device.free_bytes() == free + held


def test_fills_touch_no_neighbour(backing: Backing) -> None:
    grow(backing, 1, (0, 0, 3), (0, 4, 3))
    memory = tensor(backing, 0)
    for lane in range(2):
        pages(memory, 0, 3, lane).fill_(7)
        pages(memory, 4, 3, lane).fill_(9)
    torch.cuda.synchronize()
    grow(backing, 2, (0, 3, 1))
    for lane in range(2):
        assert is_pattern(pages(memory, 3, 1, lane))
        assert bool((pages(memory, 0, 3, lane) == 7).all())
        assert bool((pages(memory, 4, 3, lane) == 9).all())
    torch.cuda.synchronize()
    assert backing.unmap([(0, 3, 1)]).ok
    assert backing.release([(0, 3, 1)]).ok
    assert bool((pages(memory, 0, 3) == 7).all())
    assert bool((pages(memory, 4, 3) == 9).all())


@pytest.mark.parametrize(("call", "nth"), [("create", 2), ("map", 2), ("access", 3), ("fill", 2)])
def test_a_fault_is_an_outcome_and_the_retry_works(device: CudaDevice, backing: Backing, call: str, nth: int) -> None:
    run = (0, 0, 40)
    free = device.free_bytes()
    device.faults.arm(call, nth=nth)
    outcome = backing.reserve(1, [run])
    if call == "create":
        assert (outcome.status, outcome.exhausted, backing.held()) == (Status.INJECTED, True, [0, 0])
        assert device.free_bytes() == free
        assert backing.reserve(2, [run]).ok
    else:
        outcome = backing.map([run])
        assert (outcome.status, outcome.call) == (Status.INJECTED, call)
    assert backing.map([run]).ok
    assert is_pattern(pages(tensor(backing, 0), 0, 40, lane=1))
    device.faults.arm("unmap", nth=2)
    assert backing.unmap([run]).call == "unmap"
    assert backing.restore([run]).ok
    assert is_pattern(pages(tensor(backing, 0), 0, 40))


def test_a_full_card_is_an_ordinary_miss(device: CudaDevice) -> None:
    huge = device.total_bytes() // (1 << 30) + 8
    pool = PoolGeometry(name="huge", domain=0, pages=huge, reservation_bytes=huge << 30, lanes=[(0, 1 << 30)])
    backing = Backing(device, [pool])
    free = device.free_bytes()
    outcome = backing.reserve(1, [(0, 0, huge)])
    assert (outcome.exhausted, outcome.status, outcome.call) == (True, Status.OUT_OF_MEMORY, "create")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in outcome.detail
    assert (backing.held(), device.free_bytes()) == ([0], free)
    grow(backing, 2, (0, 0, 1))
    backing.close()


def test_growing_and_shrinking_for_long_leaks_nothing(device: CudaDevice, backing: Backing) -> None:
    def cycles(count: int, first: int) -> None:
        for txn in range(first, first + count):
            grow(backing, txn, (1, 1, 4))
            assert backing.unmap([(1, 1, 4)]).ok
            assert backing.release([(1, 1, 4)]).ok

    grow(backing, 0, (0, 0, 1))
    cycles(10, 1)
    free = device.free_bytes()
    cycles(10_000, 11)
    assert device.free_bytes() == free


def test_another_thread_without_a_device_of_its_own_may_call(device: CudaDevice, backing: Backing) -> None:
    outcomes = []

    def work() -> None:
        for outcome in (backing.reserve(1, [(0, 0, 8)]), backing.map([(0, 0, 8)])):
            outcomes.append(outcome.ok)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcomes == [True, True]


def test_growing_beside_a_graph_capture_does_not_disturb_it(backing: Backing) -> None:
    """A synchronising call in the default capture mode would invalidate the capture of the whole process."""
    source = torch.ones(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    outcomes: list[bool] = []

    def work() -> None:
        for outcome in (backing.reserve(1, [(0, 0, 8)]), backing.map([(0, 0, 8)])):
            outcomes.append(outcome.ok)

    with torch.cuda.graph(graph, capture_error_mode="global"):
        result = source * 3
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert outcomes == [True, True]
    assert float(result.sum()) == 3 * 1024


def test_closing_and_letting_go_in_any_order(device: CudaDevice) -> None:
    ranges = device.counters().reservations
    backing = Backing(device, pools())
    grow(backing, 1, (0, 0, 4))
    memory = tensor(backing, 0)
    torch.cuda.synchronize()
    backing.close()
    assert device.counters().reservations == ranges + 1  # the tensor's addresses
    del memory
    assert device.counters().reservations == ranges

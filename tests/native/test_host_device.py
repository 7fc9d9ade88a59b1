"""HostDevice: real memory that comes and goes, addresses that fault, and a card shared by processes."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from kvcached_dist._native import Backing, HostDevice, Status, cuda_available

from .support import GRANULE, Child, grow, host, pool, shrink

MIB = 1 << 20


def mapped_resident_bytes(address: int) -> int:
    """Rss of the mapping that starts at an address, as the kernel accounts it; 0 if there is none."""
    text = Path("/proc/self/smaps").read_text()
    _, found, rest = text.partition(f"\n{address:08x}-")
    return int(rest.partition("\nRss:")[2].split()[0]) * 1024 if found else 0


def touch(address: int) -> None:
    ctypes.memset(address, 1, 1)


def test_memory_is_committed_by_reserve_and_gone_after_release() -> None:
    device = HostDevice(64 * MIB, MIB)
    backing = Backing(device, [pool(pages=8, page_bytes=MIB)])
    runs = [(0, 0, 4)]
    assert (device.resident_bytes(), device.free_bytes(), device.total_bytes()) == (0, 64 * MIB, 64 * MIB)
    assert backing.reserve(1, runs).ok
    assert (device.resident_bytes(), device.free_bytes()) == (4 * MIB, 60 * MIB)
    assert mapped_resident_bytes(backing.base(0)) == 0
    assert backing.map(runs).ok
    np.from_dlpack(backing.array(0))[: 4 * MIB] = 1
    assert mapped_resident_bytes(backing.base(0)) == 4 * MIB
    shrink(backing, *runs)
    assert (device.resident_bytes(), device.free_bytes()) == (0, 64 * MIB)
    assert mapped_resident_bytes(backing.base(0)) == 0


@pytest.mark.parametrize("state", ["reserved", "held", "mapped", "access refused", "unmapped", "neighbour"])
def test_touching_what_is_not_mapped_faults(state: str) -> None:
    device, backing = host(pool())
    run = (0, 0, 1)
    if state != "reserved":
        assert backing.reserve(1, [run]).ok
    if state == "access refused":
        device.faults.arm("access", nth=1)
        assert not backing.map([run]).ok
    if state in ("mapped", "unmapped", "neighbour"):
        assert backing.map([run]).ok
    if state == "unmapped":
        assert backing.unmap([run]).ok
    address = backing.base(0) + (GRANULE if state == "neighbour" else 0)
    status = Child(lambda: touch(address)).wait()
    assert status == (0 if state == "mapped" else -signal.SIGSEGV)


def test_a_card_that_is_full_says_so_and_keeps_nothing() -> None:
    device, backing = host(pool(pages=8), granules=5)
    outcome = backing.reserve(1, [(0, 0, 3), (0, 3, 3)])
    assert (outcome.ok, outcome.exhausted, outcome.status, outcome.call) == (
        False,
        True,
        Status.OUT_OF_MEMORY,
        "create",
    )
    assert (outcome.pool, outcome.offset, outcome.bytes) == (0, 3 * GRANULE, 3 * GRANULE)
    assert "1x4096" in outcome.detail
    assert (backing.held(), device.resident_bytes(), device.free_bytes()) == ([0], 0, 5 * GRANULE)
    grow(backing, 2, (0, 0, 5))
    assert device.free_bytes() == 0
    assert backing.reserve(3, [(0, 5, 1)]).exhausted


def test_memory_that_the_kernel_refuses_is_not_counted() -> None:
    device, backing = host(pool())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * GRANULE, limits[1]))  # holds for a memfd as well
    try:
        outcome = backing.reserve(1, [(0, 0, 4)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (outcome.status, outcome.code, outcome.exhausted) == (Status.DRIVER_ERROR, errno.EFBIG, False)
    assert (device.free_bytes(), device.resident_bytes()) == (device.total_bytes(), 0)
    grow(backing, 2, (0, 0, 4))


@pytest.mark.parametrize(
    ("capacity", "granule", "message"),
    [(1 << 20, 12288, "power of two"), (1 << 20, 2048, "power of two"), (4096, 8192, "less than one granule")],
)
def test_numbers_that_make_no_card_are_refused(capacity: int, granule: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostDevice(capacity, granule)


def test_cards_are_named() -> None:
    assert HostDevice(MIB, GRANULE, card="card-7").card_id == "card-7"
    assert HostDevice(MIB, GRANULE).card_id != HostDevice(MIB, GRANULE).card_id
    assert (HostDevice(4 * MIB).granule_bytes, HostDevice(4 * MIB).kind) == (2 * MIB, "host")


def test_a_large_granule_aligns_the_addresses() -> None:
    backing = Backing(HostDevice(64 * MIB, 2 * MIB), [pool(pages=3, page_bytes=149_760, lanes=2)])
    assert backing.base(0) % (2 * MIB) == 0


# --- arrays ----------------------------------------------------------------------------------------------------------


def test_arrays_are_the_memory_itself() -> None:
    _, backing = host(pool())
    grow(backing, 1, (0, 0, 2))
    tensor, array = from_dlpack(backing.array(0)), np.from_dlpack(backing.array(0))
    assert (tensor.shape, tensor.dtype, tensor.data_ptr()) == ((8 * GRANULE,), torch.uint8, backing.base(0))
    tensor[10] = 77
    assert array[10] == 77
    with pytest.raises(IndexError, match="pool 1 of 1"):
        backing.array(1)


def test_an_array_keeps_the_backing_alive() -> None:
    device, backing = host(pool())
    grow(backing, 1, (0, 0, 1))
    tensor = from_dlpack(backing.array(0))
    del backing
    tensor[:GRANULE] = 5
    assert int(tensor[:GRANULE].sum()) == 5 * GRANULE
    del tensor
    assert (device.counters().reservations, device.resident_bytes()) == (0, 0)


def test_addresses_of_a_closed_backing_stay_taken_while_an_array_exists() -> None:
    device, backing = host(pool())
    grow(backing, 1, (0, 0, 1))
    tensor, address = from_dlpack(backing.array(0)), backing.base(0)
    backing.close()
    assert (device.resident_bytes(), device.counters().reservations) == (0, 1)
    assert Child(lambda: touch(address)).wait() == -signal.SIGSEGV
    del tensor
    assert device.counters().reservations == 0


# --- one card, several processes -------------------------------------------------------------------------------------


def test_devices_of_one_card_file_share_its_capacity(tmp_path: Path) -> None:
    file = str(tmp_path / "card")
    one, two = (HostDevice(8 * GRANULE, GRANULE, card_file=file) for _ in range(2))
    backings = [Backing(device, [pool(pages=8)]) for device in (one, two)]
    assert one.card_id == two.card_id == file
    grow(backings[0], 1, (0, 0, 5))
    assert one.free_bytes() == two.free_bytes() == 3 * GRANULE
    assert backings[1].reserve(1, [(0, 0, 4)]).exhausted
    grow(backings[1], 2, (0, 0, 3))
    shrink(backings[0], (0, 0, 5))
    assert two.free_bytes() == 5 * GRANULE


def test_what_a_killed_process_held_is_free_again(tmp_path: Path) -> None:
    file = str(tmp_path / "card")
    device = HostDevice(8 * GRANULE, GRANULE, card_file=file)
    backing = Backing(device, [pool(pages=8)])
    ready, tell = os.pipe()

    def hold() -> None:
        mine = Backing(HostDevice(8 * GRANULE, GRANULE, card_file=file), [pool(pages=8)])
        grow(mine, 1, (0, 0, 6))
        os.write(tell, b"x")
        time.sleep(60)

    child = Child(hold)
    try:
        assert os.read(ready, 1) == b"x"
        assert device.free_bytes() == 2 * GRANULE
        assert backing.reserve(1, [(0, 0, 3)]).exhausted
    finally:
        child.kill()
    try:
        assert backing.reserve(1, [(0, 0, 8)]).ok  # while the dead process has not even been reaped
    finally:
        assert child.wait() == -signal.SIGKILL
        os.close(ready)
        os.close(tell)
    assert device.free_bytes() == 0


def test_the_slot_of_a_device_that_is_gone_is_used_again(tmp_path: Path) -> None:
    for _ in range(600):
        HostDevice(MIB, GRANULE, card_file=str(tmp_path / "card"))
    assert HostDevice(MIB, GRANULE, card_file=str(tmp_path / "card")).free_bytes() == MIB


def test_card_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    card = tmp_path / "card"
    keep = HostDevice(MIB, GRANULE, card_file=str(card))
    with pytest.raises(ValueError, match="in use with a capacity of 1048576 bytes"):
        HostDevice(2 * MIB, GRANULE, card_file=str(card))
    del keep
    assert HostDevice(2 * MIB, GRANULE, card_file=str(card)).total_bytes() == 2 * MIB
    foreign = tmp_path / "foreign"
    foreign.write_text("somebody's notes")
    with pytest.raises(ValueError, match="not a card file"):
        HostDevice(MIB, GRANULE, card_file=str(foreign))
    assert foreign.read_text() == "somebody's notes"
    (tmp_path / "link").symlink_to(card)
    with pytest.raises(ValueError, match="cannot be opened"):
        HostDevice(MIB, GRANULE, card_file=str(tmp_path / "link"))


def test_a_forked_child_gives_back_nothing_of_its_parent() -> None:
    device, backing = host(pool())
    grow(backing, 1, (0, 0, 2))
    array = np.from_dlpack(backing.array(0))
    array[: 2 * GRANULE] = 9

    def meddle() -> None:
        assert backing.unmap([(0, 0, 2)]).status is Status.INVALID_ARGUMENT
        assert backing.abort(1).status is Status.INVALID_ARGUMENT
        backing.close()

    assert Child(meddle).wait() == 0
    assert device.resident_bytes() == 2 * GRANULE
    assert (array[: 2 * GRANULE] == 9).all()
    grow(backing, 2, (0, 2, 1))


def test_the_reason_for_having_no_cuda_is_told() -> None:
    usable, reason = cuda_available()
    assert usable == (reason == "")

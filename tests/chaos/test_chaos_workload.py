"""The workload on a real coordinator of one rank: it ends waves at rest, and it finds what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_dist import Coordinator, World, _native
from kvcached_dist.chaos.board import RestBoard
from kvcached_dist.chaos.options import CARD_BYTES, ChaosOptions
from kvcached_dist.chaos.workload import (
    WAVE_REQUESTS,
    Backlog,
    NotAtRestError,
    StalledError,
    Workload,
    published_pages,
    request,
    stamps_of,
)
from kvcached_dist.coord.core.types import DomainId, PageId, Run, Txn

DOMAINS = ("full", "swa", "rows")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    options = ChaosOptions(lease_s=2.0)
    device = _native.HostDevice(CARD_BYTES, options.granule_bytes)
    stage = options.model_spec().stage(0, 1)
    with Coordinator.start(world=World(), stage=stage, device=device, config=options.config(str(tmp_path))) as started:
        yield started


def workload(coordinator: Coordinator, tmp_path: Path, backlog: Backlog, wave_s: float = 30.0) -> Workload:
    board = RestBoard(str(tmp_path / "rests"), 0, 1, "one epoch")
    return Workload(coordinator, stamps_of(coordinator), board, backlog, seed=1, wave_s=wave_s)


def test_a_request_depends_on_seed_and_number_only() -> None:
    first = [request(1, number, DOMAINS) for number in range(60)]
    assert first == [request(1, number, DOMAINS) for number in range(60)]
    assert first != [request(2, number, DOMAINS) for number in range(60)]
    assert all(r.blocks["rows"] == 1 and 1 <= r.blocks["swa"] <= 4 and 2 <= r.blocks["full"] <= 12 for r in first)
    assert len({r.lifetime for r in first}) > 10


def test_a_backlog_knows_what_is_answered() -> None:
    backlog = Backlog((3, 7), 2)
    assert (backlog.issued, backlog.answered) == (2 * WAVE_REQUESTS, 2 * WAVE_REQUESTS - 2)


@pytest.mark.slow
def test_waves_end_at_rest_with_every_request_answered(coordinator: Coordinator, tmp_path: Path) -> None:
    work = workload(coordinator, tmp_path, Backlog((2, 5), 1))
    work.ask_to_stop()
    work.run()
    assert work.backlog() == Backlog((), 2)
    totals, record = work._stamps.totals, work.record
    assert totals.corrupt == 0
    assert totals.verified >= totals.written > WAVE_REQUESTS
    assert [rest.wave for rest in record.rests] == [1]
    assert record.leaked_bytes == 0
    assert record.progress
    assert published_pages(coordinator) == dict.fromkeys(DOMAINS, (0,))


@pytest.mark.slow
def test_a_foreign_write_into_a_block_is_found(coordinator: Coordinator, tmp_path: Path) -> None:
    work = workload(coordinator, tmp_path, Backlog((0, 1, 2, 3), 1))
    for _ in range(3):
        work._run_step()
    block = next(iter(work._live.values())).blocks["swa"].ids[0]
    coordinator.backing.tensor("c4_state")[0, block, 0] += 1
    work.ask_to_stop()
    work.run()
    assert work._stamps.totals.corrupt == 1
    assert work._stamps.totals.first[0].pool == "c4_state"


@pytest.mark.slow
def test_memory_that_nothing_accounts_for_is_found_at_rest(coordinator: Coordinator, tmp_path: Path) -> None:
    work = workload(coordinator, tmp_path, Backlog())
    run = Run(DomainId(0), PageId(coordinator.domains["full"].blocks - 1), 1)
    assert coordinator.backing.reserve(Txn(1 << 40), [run]).ok
    with pytest.raises(NotAtRestError, match=r"holds \d+ bytes at the end of wave"):
        work._check_rest()
    assert work.record.leaked_bytes > 0


@pytest.mark.slow
def test_a_wave_that_does_not_end_is_stalled(coordinator: Coordinator, tmp_path: Path) -> None:
    with pytest.raises(StalledError, match=r"wave 0 has not ended on all ranks after 0\.001 s"):
        workload(coordinator, tmp_path, Backlog(), wave_s=0.001).run()


@pytest.mark.slow
def test_requests_that_ran_wait_again(coordinator: Coordinator, tmp_path: Path) -> None:
    work = workload(coordinator, tmp_path, Backlog((1, 4), 1))
    for _ in range(2):
        work._run_step()
    assert work._live
    assert work.backlog() == Backlog((1, 4), 1)


@pytest.mark.slow
def test_the_word_to_stop_comes_from_another_thread(coordinator: Coordinator, tmp_path: Path) -> None:
    work = workload(coordinator, tmp_path, Backlog())
    threading.Timer(0.2, work.ask_to_stop).start()
    work.run()
    assert work.backlog().waiting == ()
    assert work.wave >= 1


def test_the_board_knows_when_all_ranks_of_an_epoch_rest(tmp_path: Path) -> None:
    path = str(tmp_path / "rests")
    boards = [RestBoard(path, rank, 3, "epoch 1") for rank in range(3)]
    boards[0].ended(4)
    boards[2].ended(4)
    assert not boards[0].all_ended(4)
    boards[1].ended(4)
    assert boards[0].all_ended(4)
    assert not boards[0].all_ended(5)
    other = RestBoard(path, 0, 3, "epoch 2")
    assert not other.all_ended(4)
    for board in (*boards, other, other):
        board.close()

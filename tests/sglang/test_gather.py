"""What the ranks of an engine say to one another before there are links: bounded, and never in the engine's groups."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from kvcached_dist.coord.core.errors import WaitTimeout
from kvcached_dist.sglang import engine
from tests.sglang.server import free_port
from tests.sglang.test_agreement import configurator, sizes, starting

RANKS = 3
WAIT_S = 0.6

mine = threading.local()


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads, each with the store through which the engine's processes would have met."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(engine, "default_store", lambda: PrefixStore("default_pg", store))
    monkeypatch.setattr(engine, "world_group", lambda: SimpleNamespace(world_size=RANKS, rank_in_group=mine.rank))


def as_ranks(ranks: Sequence[int], call: Any) -> list[Any]:
    """The results of ``call(rank)``, at once in a thread each; an exception is a result."""

    def run(rank: int) -> Any:
        mine.rank = rank
        try:
            return call(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


def test_all_ranks_hear_the_same_in_rank_order() -> None:
    def talk(rank: int) -> Any:
        time.sleep(0.05 * rank)
        return engine.gather({"rank": rank}, "offer", 10.0), engine.gather(rank * rank, "takeover", 10.0)

    said = as_ranks(range(RANKS), talk)
    assert said == [([{"rank": 0}, {"rank": 1}, {"rank": 2}], [0, 1, 4])] * RANKS


def test_a_rank_without_the_plugin_is_named_in_time() -> None:
    began = time.monotonic()
    said = as_ranks([0, 2], lambda rank: engine.gather(rank, "offer", WAIT_S))
    assert time.monotonic() - began < WAIT_S + 3.0
    for error in said:
        assert isinstance(error, WaitTimeout)
        assert error.who == "rank(s) 1"
        assert "ENABLE_KVCACHED" in str(error)
        assert "kvcached_dist 0." in str(error)
        assert "KVCACHED_DIST_START_TIMEOUT_S" in str(error)


def test_a_rank_with_another_version_is_a_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "version", lambda _name: "0.2.0" if mine.rank == 2 else "0.1.0")
    first, second, third = (error.who for error in as_ranks(range(RANKS), lambda r: engine.gather(r, "offer", WAIT_S)))
    assert (first, second, third) == ("rank(s) 2", "rank(s) 2", "rank(s) 0, 1")


def test_the_agreement_of_an_engine_waits_no_longer_than_the_setting_says(engine_settings: Any) -> None:
    made = starting(start_timeout_s=WAIT_S)
    (said,) = as_ranks([0], lambda _rank: made.agree(configurator(), sizes()))
    assert isinstance(said, WaitTimeout)
    assert said.who == "rank(s) 1, 2"
    assert said.seconds == WAIT_S


PROCESS = """
import sys
from types import SimpleNamespace

import torch.distributed

from kvcached_dist.sglang import engine

rank, port = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
engine.world_group = lambda: SimpleNamespace(world_size=2, rank_in_group=engine.world_rank())
print(engine.gather(f"rank {rank}", "offer", 60.0), flush=True)
engine.gather("here still", "takeover", 60.0)  # the store is a part of rank 0
"""


@pytest.mark.slow
def test_processes_talk_through_the_store_in_which_they_have_met() -> None:
    command = [sys.executable, "-c", PROCESS]
    port = str(free_port())
    ranks = [subprocess.Popen([*command, str(rank), port], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    assert [rank.communicate(timeout=90)[0] for rank in ranks] == ["['rank 0', 'rank 1']\n"] * 2

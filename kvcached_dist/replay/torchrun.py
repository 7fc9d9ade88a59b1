"""A rank that torchrun started: place and store come from its environment, reports meet on rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from ..errors import ConfigError
from .launcher import OnNews, first_cause, news_of
from .options import ReplayOptions
from .outcome import RankOutcome
from .rank_main import Seat, run_rank
from .report import Report

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_GATHER_GRACE_S = 6.0


def seat_from_environment(options: ReplayOptions, environ: Mapping[str, str]) -> tuple[Seat, bool]:
    """Where this process sits.

    Args:
        options: of the run.
        environ: variables that torchrun sets.

    Returns:
        The seat (its session still empty), and whether this process hosts the store.

    Raises:
        ConfigError: a variable is missing or unusable, or the world has another size than ``tp x pp``.
    """
    missing = [name for name in _VARIABLES if not environ.get(name)]
    example = f"torchrun --nproc-per-node {options.world_size} --module kvcached_dist.cli replay --launcher torchrun ..."
    if missing:
        raise ConfigError(f"--launcher torchrun: {missing[0]} is not set; start it with: {example}")
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not environ[name].isdigit():
            raise ConfigError(f"{name}={environ[name]}: not a number; start it with: {example}")
        numbers[name] = int(environ[name])
    if numbers["WORLD_SIZE"] != options.world_size:
        raise ConfigError(
            f"WORLD_SIZE={numbers['WORLD_SIZE']}: --tp {options.tp} --pp {options.pp} needs {options.world_size} "
            f"processes; start it with: {example}"
        )
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ConfigError(f"RANK={numbers['RANK']}: outside the world of {numbers['WORLD_SIZE']}; start it with: {example}")
    hosts = numbers["RANK"] == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True"
    return Seat(numbers["RANK"], "", environ["MASTER_ADDR"], numbers["MASTER_PORT"], numbers["LOCAL_RANK"]), hosts


def run_under_torchrun(options: ReplayOptions, on_news: OnNews | None = None) -> tuple[int, Report | None]:
    """Run this process's rank.

    Args:
        options: validated options.
        on_news: called with the progress, on rank 0 only.

    Returns:
        The exit status of this process, and on rank 0 the report of the whole run.

    Raises:
        ConfigError: see :func:`seat_from_environment`.

    Blocks: for the run; afterwards rank 0 waits for the others' outcomes, a lease and a few seconds at most.
    """
    started = time.monotonic()
    seat, hosts = seat_from_environment(options, os.environ)
    config = options.config()
    store = dist.TCPStore(
        seat.store_host, seat.store_port, world_size=None, is_master=hosts, wait_for_workers=False,
        timeout=timedelta(seconds=config.start_timeout_s),
    )  # fmt: skip
    seat = Seat(seat.rank, _session(store, seat.rank), seat.store_host, seat.store_port, seat.local_rank)
    mine: list[RankOutcome] = []

    def report(outcome: RankOutcome) -> None:
        mine.append(outcome)
        store.set(_key(seat, seat.rank), outcome.to_json())

    progress = news_of(on_news) if on_news is not None and seat.rank == 0 else None
    status = run_rank(options, seat, store if options.world_size > 1 else None, report, progress)
    if seat.rank != 0:
        return status, None
    outcomes = _gather(store, seat, options.world_size, mine[0], config.lease_s + _GATHER_GRACE_S)
    failure = first_cause(outcomes, [], options.world_size)
    whole = Report(options.tp, options.pp, outcomes, failure, [], time.monotonic() - started)
    return max(status, whole.exit_status), whole


def _session(store: dist.Store, rank: int) -> str:
    # torchrun may restart its workers on the same store: every round gets a session of its own.
    prefix = f"replay/round/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        store.set(prefix, f"{os.getpid()}-{time.time_ns():x}")
    return store.get(prefix).decode()


def _key(seat: Seat, rank: int) -> str:
    return f"replay/outcome/{seat.session}/{rank}"


def _gather(store: dist.Store, seat: Seat, world_size: int, mine: RankOutcome, wait_s: float) -> list[RankOutcome]:
    deadline = time.monotonic() + wait_s
    outcomes = [mine]
    for rank in range(1, world_size):
        left = max(0.1, deadline - time.monotonic())
        try:
            store.wait([_key(seat, rank)], timedelta(seconds=left))
        except (RuntimeError, ValueError):
            # A rank that is gone does not report; first_cause says so.
            continue
        outcomes.append(RankOutcome.from_json(store.get(_key(seat, rank)).decode()))
    return outcomes


__all__ = ["run_under_torchrun", "seat_from_environment"]

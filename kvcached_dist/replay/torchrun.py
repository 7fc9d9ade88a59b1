"""A rank that torchrun started: place and store come from its environment, reports meet on rank 0."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping

from ..coord.links.bounded import Poll, Store, StoreConnections, StoreLost
from ..coord.links.torchrun import TorchrunWorld
from ..errors import ConfigError, WaitTimeout
from .launcher import OnNews, first_cause, news_of
from .options import ReplayOptions
from .outcome import RankOutcome
from .rank_main import Seat, run_rank
from .report import Report

_GATHER_GRACE_S = 6.0

_log = logging.getLogger(__name__)


def world_from_environment(options: ReplayOptions, environment: Mapping[str, str]) -> TorchrunWorld:
    """Where this process sits.

    Args:
        options: of the run.
        environment: variables that torchrun sets.

    Raises:
        ConfigError: a variable is missing or unusable, or the world has another size than ``tp x pp``.
    """
    example = f"torchrun --nproc-per-node {options.world_size} -m kvcached_dist.cli replay --launcher torchrun ..."
    try:
        world = TorchrunWorld.from_environment(environment)
    except ConfigError as error:
        raise ConfigError(f"--launcher torchrun: {error}; start it with: {example}") from error
    if world.world != options.world_size:
        raise ConfigError(
            f"WORLD_SIZE={world.world}: --tp {options.tp} --pp {options.pp} needs {options.world_size} processes; "
            f"start it with: {example}"
        )
    return world


def run_under_torchrun(options: ReplayOptions, on_news: OnNews | None = None) -> tuple[int, Report | None]:
    """Run this process's rank.

    Args:
        options: validated options.
        on_news: called with the progress, on rank 0 only.

    Returns:
        The exit status of this process, and on rank 0 the report of the whole run.

    Raises:
        ConfigError: see :func:`world_from_environment`.

    Blocks: for the run; afterwards rank 0 waits for the others' outcomes, a lease and a few seconds at most.
    """
    started = time.monotonic()
    world = world_from_environment(options, os.environ)
    config = options.config()
    store = world.connect(config.start_timeout_s)
    connections = StoreConnections(store)
    local_rank = os.environ.get("LOCAL_RANK", "")
    # Prefix of this incarnation: torchrun may restart its workers on the same store.
    seat = Seat(world.rank, f"replay/{world.run_name}", int(local_rank) if local_rank.isdigit() else world.rank)
    mine: list[RankOutcome] = []

    def report(outcome: RankOutcome) -> None:
        mine.append(outcome)
        _hand_in(connections, seat, outcome, config.ipc_timeout_s)

    progress = news_of(on_news) if on_news is not None and seat.rank == 0 else None
    status = run_rank(options, seat, store if options.world_size > 1 else None, report, progress)
    if seat.rank != 0:
        return status, None
    outcomes = _gather(connections, seat, options.world_size, mine[0], config.lease_s + _GATHER_GRACE_S)
    failure = first_cause(outcomes, [], options.world_size)
    whole = Report(options.tp, options.pp, outcomes, failure, [], time.monotonic() - started)
    return max(status, whole.exit_status), whole


def _key(seat: Seat, rank: int) -> str:
    return f"replay/outcome/{seat.session}/{rank}"


def _hand_in(connections: StoreConnections, seat: Seat, outcome: RankOutcome, wait_s: float) -> None:
    """Leave this rank's outcome for rank 0. Without a store that answers there is nobody to read it."""
    key, text = _key(seat, seat.rank), outcome.to_json()

    def hand_in(store: Store) -> None:
        store.set(key, text)
        # A set has no reply: only what can be found has arrived.
        store.check([key])

    try:
        connections.call(hand_in, wait_s, what=f"take the outcome of rank {seat.rank} (key {key})")
    except (WaitTimeout, StoreLost) as error:
        _log.warning("event=outcome_not_handed_in rank=%d error=%s", seat.rank, error)


def _gather(
    connections: StoreConnections, seat: Seat, world_size: int, mine: RankOutcome, wait_s: float
) -> list[RankOutcome]:
    """The outcomes that ranks have handed in. Blocks: at most ``wait_s`` and one bounded store call."""
    poll = Poll(time.monotonic() + wait_s)
    outcomes = {seat.rank: mine}
    try:
        while True:
            for rank in set(range(world_size)) - set(outcomes):
                text = _handed_in(connections, _key(seat, rank), wait_s)
                if text is not None:
                    outcomes[rank] = RankOutcome.from_json(text)
            if len(outcomes) == world_size or not poll.again():
                break
    except (WaitTimeout, StoreLost) as error:
        _log.warning("event=outcomes_not_gathered rank=%d error=%s", seat.rank, error)
    # A rank that is gone does not report; first_cause says so.
    return [outcome for _, outcome in sorted(outcomes.items())]


def _handed_in(connections: StoreConnections, key: str, wait_s: float) -> str | None:
    def read(store: Store) -> str | None:
        return store.get(key).decode() if store.check([key]) else None

    return connections.call(read, wait_s, what=f"say whether key {key} is there")


__all__ = ["run_under_torchrun", "world_from_environment"]

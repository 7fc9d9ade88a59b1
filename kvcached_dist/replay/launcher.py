"""All ranks of a run: start them, watch them all at once, end them, leave nothing behind."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

from ..coord.links.bounded import run_bounded
from ..coord.links.store import connect_store
from ..errors import Interrupted, WaitTimeout
from .options import ReplayOptions
from .outcome import Failure, RankOutcome
from .rank_main import Seat, leave, run_rank
from .report import Report

LOOPBACK = "127.0.0.1"

STORE_WAIT_S = 60.0
"""Longest wait of a rank for the bootstrap store."""

TERM_WAIT_S = 2.0
"""Between SIGTERM and SIGKILL."""

SURVIVOR_GRACE_S = 6.0
"""What survivors may take beyond a lease to report the first cause and leave."""

NEWS_INTERVAL_S = 0.1

READ_S = 5.0
"""Longest wait for the rest of a message: a rank that was stopped while it wrote may never finish it."""


@dataclass(frozen=True, slots=True)
class News:
    """Progress of the run, from rank 0.

    Attributes:
        completed: requests done.
        requests: of how many.
        running: requests that run now.
        virtual_s: virtual time.
        physical_bytes: held by rank 0 now.
    """

    completed: int
    requests: int
    running: int
    virtual_s: float
    physical_bytes: int


OnNews = Callable[[News], None]


@dataclass(slots=True)
class _Child:
    rank: int
    process: SpawnProcess
    pipe: Connection
    outcome: RankOutcome | None = None
    piped: bool = True


@dataclass(slots=True)
class _Ranks:
    """The processes of a run, as the parent sees them."""

    options: ReplayOptions
    children: list[_Child] = field(default_factory=list)
    deaths: list[tuple[int, str]] = field(default_factory=list)

    def alive(self) -> list[_Child]:
        return [child for child in self.children if child.process.is_alive()]


def run_spawned(options: ReplayOptions, on_news: OnNews | None = None) -> Report:
    """Run all ranks as processes of this one.

    Args:
        options: validated options.
        on_news: called with the progress of rank 0.

    Returns:
        The report; ranks that died have no outcome in it.

    Raises:
        Interrupted: SIGINT or SIGTERM came; all ranks are gone by then.

    Threads: the main thread, because it sets signal handlers.

    Blocks: for the run; after the first death or failure at most a lease and a few seconds.
    """
    started = time.monotonic()
    lease_s = options.config().lease_s
    ranks = _Ranks(options)
    store = connect_store(LOOPBACK, 0, True, options.world_size, STORE_WAIT_S) if options.world_size > 1 else None
    try:
        with _signals():
            _start(ranks, store.port if store is not None else 0)
            _watch(ranks, lease_s, on_news)
    finally:
        _end(ranks)
        _sweep(ranks)
    return _report(ranks, time.monotonic() - started)


def _start(ranks: _Ranks, port: int) -> None:
    context = mp.get_context("spawn")
    session = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
    options = ranks.options
    for rank in range(options.world_size):
        ours, theirs = context.Pipe(duplex=False)
        seat = Seat(rank, session, local_rank=rank)
        process = context.Process(target=_child_main, args=(options, seat, port, theirs), name=f"replay-rank-{rank}")
        process.start()
        theirs.close()
        ranks.children.append(_Child(rank, process, ours))


def _child_main(options: ReplayOptions, seat: Seat, port: int, pipe: Connection) -> None:
    """Entry of a rank process."""
    # A terminal sends SIGINT to everybody; the parent decides, and says so by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The ranks of one host meet on the loopback, whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _leave_with_parent()
    sending = threading.Lock()

    def send(kind: str, payload: Any) -> None:
        # A parent that is gone ends this process by another way.
        with sending, contextlib.suppress(OSError):
            pipe.send((kind, payload))

    world = options.world_size
    store = connect_store(LOOPBACK, port, False, world, STORE_WAIT_S) if world > 1 else None
    progress = news_of(lambda news: send("news", news)) if seat.rank == 0 else None
    status = run_rank(options, seat, store, lambda outcome: send("outcome", outcome.to_json()), progress)
    pipe.close()
    leave(status)


def _leave_with_parent() -> None:
    """End this process when the parent is gone, however it went."""
    parent = mp.parent_process()
    if parent is None:
        return

    def follow() -> None:
        wait([parent.sentinel])
        leave(1)

    threading.Thread(target=follow, name="replay-parent", daemon=True).start()


def news_of(on_news: OnNews) -> Callable[[Any], None]:
    """A progress callback for an engine that reports at most every ``NEWS_INTERVAL_S``."""
    next_at = 0.0

    def progress(engine: Any) -> None:
        nonlocal next_at
        now = time.monotonic()
        if now < next_at:
            return
        next_at = now + NEWS_INTERVAL_S
        scheduler = engine.scheduler
        on_news(
            News(
                scheduler.totals.completed, len(engine.requests), len(scheduler.running),
                engine.clock.now_us / 1e6, engine.curve.final,
            )
        )  # fmt: skip

    return progress


def _watch(ranks: _Ranks, lease_s: float, on_news: OnNews | None) -> None:
    """Wait for all ranks at once; the first death or failure sets a deadline for the rest."""
    deadline: float | None = None
    while alive := ranks.alive():
        pipes = [child.pipe for child in ranks.children if child.piped]
        ready = wait([*pipes, *(child.process.sentinel for child in alive)], timeout=0.5)
        for child in ranks.children:
            if child.piped and child.pipe in ready:
                _read(child, on_news)
        for child in alive:
            if child.process.sentinel in ready or not child.process.is_alive():
                _note_death(ranks, child)
        failed = ranks.deaths or any(c.outcome is not None and c.outcome.failure is not None for c in ranks.children)
        if failed and deadline is None:
            deadline = time.monotonic() + lease_s + SURVIVOR_GRACE_S
        if deadline is not None and (time.monotonic() > deadline or _only_lost_ones_left(ranks)):
            break
    for child in ranks.children:
        # A pipe of somebody who still runs, or is stopped, may never say anything again.
        while child.piped and (not child.process.is_alive() or child.pipe.poll(0)):
            _read(child, on_news)


def _only_lost_ones_left(ranks: _Ranks) -> bool:
    """Whether everybody who still runs is a rank that the others have given up, such as a stopped process."""
    lost = {c.outcome.failure.rank for c in ranks.children if c.outcome is not None and c.outcome.failure is not None}
    alive = ranks.alive()
    return bool(alive) and all(child.rank in lost and child.outcome is None for child in alive)


def _read(child: _Child, on_news: OnNews | None) -> None:
    """Take one message of a rank, or learn that there will be none. Blocks: at most ``READ_S``."""
    try:
        if not child.pipe.poll(0) and not child.process.is_alive():
            raise EOFError
        kind, payload = run_bounded(child.pipe.recv, READ_S, who=f"rank {child.rank}", what="the rest of a message")
    except WaitTimeout:
        # The read goes on in its thread, which owns the pipe from here on.
        child.piped = False
        return
    except (EOFError, OSError):
        child.piped = False
        child.pipe.close()
        return
    if kind == "outcome":
        child.outcome = RankOutcome.from_json(payload)
    elif on_news is not None:
        on_news(payload)


def _note_death(ranks: _Ranks, child: _Child) -> None:
    child.process.join(0.5)
    status = child.process.exitcode
    while child.piped and child.outcome is None:
        _read(child, None)
    if status is None or child.outcome is not None or any(rank == child.rank for rank, _ in ranks.deaths):
        return
    how = f"exit status {status}" if status >= 0 else f"signal {-status} ({signal.Signals(-status).name})"
    ranks.deaths.append((child.rank, f"the process of rank {child.rank} ended with {how}"))


def _end(ranks: _Ranks) -> None:
    """Leave no process: SIGTERM, then SIGKILL, which also reaches stopped ones."""
    for child in ranks.alive():
        child.process.terminate()
    deadline = time.monotonic() + TERM_WAIT_S
    for child in ranks.children:
        child.process.join(max(0.0, deadline - time.monotonic()))
    for child in ranks.alive():
        child.process.kill()
    for child in ranks.children:
        child.process.join(5.0)


def _sweep(ranks: _Ranks) -> None:
    """Remove the snapshot files of ranks that could not do it themselves."""
    from .. import snapshot

    if any(child.process.exitcode != 0 for child in ranks.children):
        snapshot.sweep(ranks.options.config().state_dir)


def _report(ranks: _Ranks, wall_s: float) -> Report:
    options = ranks.options
    outcomes = [child.outcome for child in ranks.children if child.outcome is not None]
    deaths = [text for _, text in ranks.deaths]
    failure = first_cause(outcomes, ranks.deaths, options.world_size)
    return Report(options.tp, options.pp, outcomes, failure, deaths, wall_s)


def first_cause(outcomes: list[RankOutcome], deaths: list[tuple[int, str]], world_size: int) -> Failure | None:
    """The failure to show: what most deserves the operator's attention.

    A typed cause beats a bare death, a cause inside a rank (too small, diverged) beats the group's view of it.

    Args:
        outcomes: of the ranks that reported.
        deaths: ``(rank, how)`` of those that did not, first one first.
        world_size: ranks that there should be.
    """
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    for kind in ("input", "capacity", "divergence", "unexpected"):
        for failure in failures:
            if failure.kind == kind:
                return failure
    dead = {rank for rank, _ in deaths}
    named = [failure for failure in failures if failure.rank in dead]
    if named or failures:
        return (named or failures)[0]
    if deaths:
        rank, how = deaths[0]
        return Failure("group", rank, "the replay", how)
    if len(outcomes) < world_size:
        missing = min(set(range(world_size)) - {outcome.rank for outcome in outcomes})
        return Failure("group", missing, "the replay", f"rank {missing} did not report in time")
    return None


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into :class:`Interrupted` while ranks run."""

    def interrupt(signum: int, _frame: FrameType | None) -> None:
        raise Interrupted(signum)

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


__all__ = ["News", "first_cause", "news_of", "run_spawned"]

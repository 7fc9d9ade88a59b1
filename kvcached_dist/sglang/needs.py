"""W: the largest allocation that the engine can make until the next mark, from the requests in hand.

An upper bound, because a step that finds less than it admitted ends the server. How much of a prompt is cached is
not known before the step is planned, so prompts count whole, up to the chunk.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from . import engine
from .waiting import LOOK, Waiting, queued_length

IDLE_AFTER_S = 0.5
"""The engine is idle when it has had nothing to do for this long: a pause between two requests gives nothing back."""


class Needs:
    """What rank 0's scheduler is about to need.

    Args:
        scheduler: the engine's scheduler.

    Threads: the scheduler thread.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._page = int(scheduler.page_size)
        chunk = scheduler.chunked_prefill_size
        self._chunk = int(chunk) if chunk is not None and chunk > 0 else 0
        self._prefill_max = int(scheduler.max_prefill_tokens)
        self._steps = max(1, int(engine.context("schedule").scheduler_recv_interval or 1))
        self._per_running = engine.pages_per_decode(self._page) * self._steps
        """Token pages that a request takes which decodes, until the next mark."""
        self._drafts = engine.context("spec").speculative_algorithm is not None
        self._running_now = 0
        """Requests that run, as of the last look at the step's needs."""
        self.coming_pages = 0
        """Token pages of all prompts in hand, as of the last whole look: more than W where they take several steps."""
        self._preempts = bool(getattr(scheduler, "enable_priority_preemption", False))
        self._plain = not self._drafts and getattr(scheduler, "running_mbs", None) is None
        """Neither drafts, nor micro-batches of pipeline stages, nor, so far, beams."""
        grammars = getattr(scheduler, "grammar_manager", None)
        self._grammars = grammars if hasattr(grammars, "grammar_queue") else None
        self._waiting = Waiting(scheduler.waiting_queue)
        self._widest = 1
        """Most beams of a request so far: each has a row and takes blocks of its own."""
        self._quiet_since: float | None = None

    def queued(self, request: Any) -> None:
        """The engine has put a request into its queue: a new one, or one that was retracted."""
        self._waiting.came(request)
        self._widest = max(self._widest, beams_of(request))
        self._plain = self._plain and self._widest == 1

    def decoding(self, pulled: Sequence[Any]) -> int:
        """W of a step in which what runs just goes on, in token pages of the engine; no rows are taken in it.

        That is nearly every step, and the engine's own work has emptied the processor's caches before each of them: so
        this looks at as little as it can.

        Args:
            pulled: requests that were just received.

        Returns:
            What :meth:`pages_and_rows` would, or 0: there is more to look at.
        """
        scheduler, waiting = self._scheduler, self._waiting
        if pulled or scheduler.waiting_queue or waiting.tokens or scheduler.chunked_req is not None:
            return 0
        if not self._plain or (self._grammars is not None and self._grammars.grammar_queue):
            return 0
        running, last = scheduler.running_batch, scheduler.last_batch
        count = len(running.reqs) + (0 if last is None or last is running else len(last.reqs))
        if not count:
            return 0
        self._quiet_since = None
        return count * self._per_running + 1

    def pages_and_rows(self, pulled: Sequence[Any]) -> tuple[int, int]:
        """W in token pages of the engine, and in request rows.

        Args:
            pulled: requests that were just received and are not queued yet.
        """
        scheduler = self._scheduler
        self._running_now = running = self._running()
        if self._drafts:
            # Adaptive algorithms draft more or less while they serve; the engine asks for each of its batches, too.
            self._per_running = engine.pages_per_decode(self._page) * self._steps
        grammar = () if self._grammars is None else self._grammars.grammar_queue
        prefill = admitted = self.coming_pages = 0
        tokens, longest = self._waiting.look(scheduler.waiting_queue)
        if pulled or scheduler.waiting_queue or scheduler.chunked_req is not None or grammar:
            prefill, admitted = self._prefill(pulled, grammar, tokens, longest)
        elif not running:
            return 0, 0
        # A request that was admitted takes the rows of its further beams only when its prefill is done.
        beams = running if self._widest > 1 else 0
        rows = (admitted * self._widest + beams) * self._steps
        return prefill * self._steps + running * self._per_running + 1, rows

    def _prefill(self, pulled: Sequence[Any], grammar: Sequence[Any], tokens: int, longest: int) -> tuple[int, int]:
        """Token pages that a step takes for prompts, and how many requests it may admit; notes what comes in all.

        Args:
            pulled: requests that were just received.
            grammar: requests whose grammar is being compiled.
            tokens: of the engine's queue.
            longest: prompt in it, in tokens.
        """
        scheduler = self._scheduler
        chunk = scheduler.chunked_req
        waiting = len(scheduler.waiting_queue) + len(grammar)
        if chunk is not None:
            waiting += 1
            tokens += queued_length(chunk) - engine.prefix_tokens(chunk)
        for length in (length for request in pulled for length in _pulled_lengths(request)):
            waiting += 1
            tokens += length
            longest = max(longest, length)
        for length in self._grammar_lengths(grammar):
            tokens += length
            longest = max(longest, length)
        self.coming_pages = -(-tokens // self._page) + waiting
        tokens = min(tokens, self._chunk or max(self._prefill_max, longest))
        admitted = min(waiting, int(scheduler.max_running_requests) + 1)
        # A step rounds every request up to pages and asks for one page more for each.
        return -(-tokens // self._page) + 2 * admitted if tokens else 0, admitted

    def running_pages(self) -> int:
        """The part of the last W, in token pages, that requests take which decode: they are ended without it."""
        return self._running_now * self._per_running

    def window_pages(self, rows: int, places: int) -> int:
        """What the engine wants beyond W in sliding-window layers before it admits: a window for each request.

        It admits a request only with ``min(prompt + output, window)`` tokens and a page published and free, however
        short the prompt is.

        Args:
            rows: W in request rows.
            places: request rows that are free, or could be.

        Returns:
            Token pages of the engine. W has a page for the prompt of each request and one more already, so nothing
            where a page is as long as the window.
        """
        window = int(getattr(self._scheduler.tree_cache, "sliding_window_size", None) or 0)
        more = max(0, -(-window // self._page) - 1)
        # One more than there are places: a chunk goes on in its own, or is aborted and leaves it.
        return more * (rows if self._preempts else min(rows, (places + 1) * self._steps))

    def idle(self, pulled: Sequence[Any]) -> bool:
        """Whether nothing runs or waits, for long enough. Questions about the engine's state are no work."""
        scheduler = self._scheduler
        # What is cheap to ask first: this is asked in every step.
        if scheduler.running_batch.reqs or scheduler.waiting_queue or not scheduler.is_fully_idle():
            self._quiet_since = None
            return False
        if any(True for request in pulled for _ in _pulled_lengths(request)):
            self._quiet_since = None
            return False
        now = time.monotonic()
        if self._quiet_since is None:
            self._quiet_since = now
        return now - self._quiet_since >= IDLE_AFTER_S

    def nothing_runs(self) -> bool:
        """Whether no request decodes, nor will once its prefill is done."""
        return not self._running()

    def _running(self) -> int:
        """Requests that decode, or will as soon as their prefill is done, in all micro-batches; beams count each."""
        scheduler = self._scheduler
        running, last, stages = scheduler.running_batch, scheduler.last_batch, getattr(scheduler, "running_mbs", None)
        if stages is None and self._widest == 1:
            # Most engines, in every step: no micro-batches of pipeline stages, and requests need not be looked at.
            return len(running.reqs) + (0 if last is None or last is running else len(last.reqs))
        batches = [running, last]
        for name in ("running_mbs", "last_mbs", "mbs"):
            batches += getattr(scheduler, name, None) or ()
        distinct = {id(batch): batch for batch in batches if batch is not None}
        if self._widest == 1:
            return sum(len(batch.reqs) for batch in distinct.values())
        return sum(beams_of(request) for batch in distinct.values() for request in batch.reqs)

    def _grammar_lengths(self, grammar: Sequence[Any]) -> Iterable[int]:
        """Prompts whose grammar is being compiled: any of them may be queued, and admitted, in the next step."""
        requests = (item[0] if isinstance(item, tuple) else item for item in grammar)
        if not self._chunk or len(grammar) <= LOOK:
            return map(queued_length, requests)
        return (self._chunk,)


def beams_of(request: Any) -> int:
    """Rows that a request has once it decodes."""
    group = getattr(request, "beam_group", None)
    return 1 if group is None else int(group.beam_width)


def _pulled_lengths(request: Any) -> Iterable[int]:
    """Prompt lengths of a received object; nothing for control requests."""
    tokens = getattr(request, "input_ids", None)
    if tokens is not None:
        yield len(tokens)
    elif isinstance(batch := getattr(request, "batch", None), list):
        for part in batch:
            yield from _pulled_lengths(part)

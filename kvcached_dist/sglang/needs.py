"""W: the largest allocation that the engine can make until the next mark, from the requests in hand.

An upper bound, because a step that finds less than it admitted ends the server. How much of a prompt is cached is
not known before the step is planned, so prompts count whole, up to the chunk.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from . import engine

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
        self._quiet_since: float | None = None

    def pages_and_rows(self, pulled: Sequence[Any]) -> tuple[int, int]:
        """W in token pages of the engine, and in request rows.

        Args:
            pulled: requests that were just received and are not queued yet.
        """
        scheduler = self._scheduler
        running = self._running()
        grammar = getattr(getattr(scheduler, "grammar_manager", None), "grammar_queue", ())
        if not running and not pulled and not scheduler.waiting_queue and scheduler.chunked_req is None and not grammar:
            return 0, 0
        requests, tokens, longest = 0, 0, 0
        bound = self._chunk or self._prefill_max
        for length in self._lengths(pulled, grammar):
            requests += 1
            tokens += length
            longest = max(longest, length)
            if self._chunk and tokens >= bound:
                break
        tokens = min(tokens, self._chunk or max(bound, longest))
        waiting = len(scheduler.waiting_queue) + len(pulled) + len(grammar) + (scheduler.chunked_req is not None)
        admitted = min(max(waiting, requests), int(scheduler.max_running_requests) + 1)
        # A step rounds every request up to pages and asks for one page more for each.
        prefill = -(-tokens // self._page) + 2 * admitted if tokens else 0
        decode = running * engine.pages_per_decode(self._page) if running else 0
        return (prefill + decode) * self._steps + 1, admitted * self._steps

    def idle(self, pulled: Sequence[Any]) -> bool:
        """Whether nothing runs or waits, for long enough. Questions about the engine's state are no work."""
        scheduler = self._scheduler
        work = any(True for request in pulled for _ in _pulled_lengths(request))
        if work or scheduler.waiting_queue or not scheduler.is_fully_idle():
            self._quiet_since = None
            return False
        now = time.monotonic()
        if self._quiet_since is None:
            self._quiet_since = now
        return now - self._quiet_since >= IDLE_AFTER_S

    def _running(self) -> int:
        """Requests that decode, or will as soon as their prefill is done, in all micro-batches."""
        scheduler = self._scheduler
        batches = [scheduler.running_batch, scheduler.last_batch]
        for name in ("running_mbs", "last_mbs", "mbs"):
            batches += getattr(scheduler, name, None) or ()
        distinct = {id(batch): batch for batch in batches if batch is not None}
        return sum(len(batch.reqs) for batch in distinct.values())

    def _lengths(self, pulled: Sequence[Any], grammar: Sequence[Any]) -> Iterable[int]:
        scheduler = self._scheduler
        if scheduler.chunked_req is not None:
            yield _queued_length(scheduler.chunked_req) - engine.prefix_tokens(scheduler.chunked_req)
        for request in pulled:
            yield from _pulled_lengths(request)
        for request in scheduler.waiting_queue:
            yield _queued_length(request)
        for item in grammar:
            yield _queued_length(item[0] if isinstance(item, tuple) else item)


def _queued_length(request: Any) -> int:
    return len(request.origin_input_ids) + len(request.output_ids)


def _pulled_lengths(request: Any) -> Iterable[int]:
    """Prompt lengths of a received object; nothing for control requests."""
    tokens = getattr(request, "input_ids", None)
    if tokens is not None:
        yield len(tokens)
    elif isinstance(batch := getattr(request, "batch", None), list):
        for part in batch:
            yield from _pulled_lengths(part)

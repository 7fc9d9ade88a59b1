"""Two numbers, one rule: future tokens may count on growth, a step counts what is published.

The engine's ``PrefillAdder`` keeps two remainders. The total one (``rem_total_token_offset``) covers tokens that
requests will produce later: what every rank could still back counts there. The current one stays with published ids,
because the step allocates right away and a miss after admission ends the server. Sliding-window tokens stay with
published ids in both: the engine wants the window of a request before it admits it, and W has it there.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from .engine import pages_per_decode, prefix_tokens
from .runtime import Runtime

PARKED = "_kvcached_parked"
"""Attribute of an adder that has parked a chunk."""

TOTAL = ("rem_total_token_offset", "total_offset")
CURRENT = ("cur_rem_token_offset", "current_offset")
WINDOW = ("rem_swa_token_offset", "swa_offset")
"""What is taken off the remainders: names in ``PrefillAdder`` itself and, in newer versions, in its budget."""


class Admission:
    """Hooks on ``PrefillAdder``.

    Args:
        runtime: what is elastic in this process.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._free = 0
        """Tokens published and free when the present adder was made. None are taken while it plans."""

    def opened(self, _result: None, adder: Any, *_args: Any, **_kwargs: Any) -> None:
        """After ``__init__``: growth counts for tokens of later steps, and decodes of a mixed step for whole pages.

        The engine starts with one token for each request that decodes in the same step (mixed chunks only). Each may
        open a page, and a miss ends the server; behind growable tokens there is no slack that would hide it.
        """
        if not self._runtime.elastic:
            return
        self._free = self._runtime.published_free_tokens()
        _shift(adder, TOTAL, -self._runtime.growable_tokens())
        if mixed := _shift(adder, CURRENT, 0):
            more = mixed * (adder.page_size * pages_per_decode(adder.page_size) - 1)
            _shift(adder, CURRENT, more)
            _shift(adder, WINDOW, mixed + more)

    def add_chunked_req(self, original: Any, adder: Any, req: Any) -> Any:
        """The next chunk of a long prompt: as much as is published, and none at all where nothing is.

        The engine would schedule a whole chunk even when nothing is left. A parked chunk stays the engine's chunked
        request and comes again in the next round; nobody else is admitted before it.
        """
        if not self._runtime.elastic:
            return original(adder, req)
        page = adder.page_size
        room = (int(adder.cur_rem_tokens) - page) // page * page
        if room <= 0:
            return self._park(adder, req)
        withheld = max(0, adder.rem_chunk_tokens - room)
        adder.rem_chunk_tokens -= withheld
        try:
            rest = original(adder, req)
        finally:
            adder.rem_chunk_tokens += withheld
        # The engine itself parks a chunk that finds nothing in sliding-window layers.
        return rest if req in adder.can_run_list else self._park(adder, req)

    def _park(self, adder: Any, req: Any) -> Any:
        setattr(adder, PARKED, True)
        self._runtime.parked.found_nothing(req)
        return req

    def add_one_req(self, original: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """A waiting request: not before a parked chunk, and only with its first step published."""
        if self._runtime.elastic:
            if getattr(adder, PARKED, False):
                return _results().OTHER
            free, chunk = self._free - _shift(adder, CURRENT, 0), adder.rem_chunk_tokens
            # Nearly always the whole chunk is there, and it does not matter how much of it the request takes.
            if (chunk is None or free < chunk + 2 * adder.page_size) and not self._fits_now(adder, req, free):
                return _results().NO_TOKEN
        return original(adder, req, *args, **kwargs)

    def add_one_req_ignore_eos(self, original: Any, adder: Any, req: Any) -> Any:
        """Requests of known length without a prefix cache: the engine counts their future on the current remainder."""
        if not self._runtime.elastic:
            return original(adder, req)
        growable = self._runtime.growable_tokens()
        _shift(adder, CURRENT, -growable)
        try:
            verdict = original(adder, req)
        finally:
            _shift(adder, CURRENT, growable)
        results = _results()
        if verdict == results.CONTINUE and adder.cur_rem_tokens <= 0:
            return results.NO_TOKEN
        return verdict

    @staticmethod
    def _fits_now(adder: Any, req: Any, free: int) -> bool:
        tokens = len(req.full_untruncated_fill_ids) - prefix_tokens(req)
        if adder.rem_chunk_tokens is not None:
            tokens = min(tokens, max(adder.rem_chunk_tokens, 0))
        needed = int(adder.ceil_paged_tokens(tokens)) + int(adder.page_size)
        if needed <= free:
            return True
        # What the prefix cache holds may be evicted for it, but not the request's own prefix.
        if needed <= adder.cur_rem_tokens - prefix_tokens(req):
            return True
        with adder._lock_node(req.last_node):
            return bool(needed <= adder.cur_rem_tokens)


def _shift(adder: Any, names: tuple[str, str], tokens: int) -> int:
    """Take so many tokens more off a remainder; what is taken off it then."""
    budget = getattr(adder, "memory_budget", None)
    owner, name = (adder, names[0]) if budget is None else (budget, names[1])
    taken = int(getattr(owner, name)) + tokens
    setattr(owner, name, taken)
    return taken


@functools.cache
def _results() -> Any:
    return importlib.import_module("sglang.srt.managers.schedule_policy").AddReqResult

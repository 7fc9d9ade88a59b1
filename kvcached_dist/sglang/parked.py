"""A chunk that found nothing, and how long that may last.

A parked chunk holds the pages of its prompt so far, and nobody is admitted before it. While others run they finish and
leave memory. With nothing else running only others on the card can, or a higher limit; two engines that each hold a
parked chunk would wait for one another for ever. So the wait has an end, and then that of the request: by the engine's
own abort, with the broadcast that every rank handles at the same step.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("kvcached_dist.sglang")


class ParkedChunk:
    """How long the engine's chunked request has been parked with nothing else running.

    Args:
        limit_s: longest wait, seconds.

    Attributes:
        rounds: steps in which a chunk was parked.

    Threads: the scheduler thread.
    """

    def __init__(self, limit_s: float) -> None:
        self.rounds = 0
        self._limit_s = limit_s
        self._request: Any = None
        self._since = 0.0
        self._seen = False

    def found_nothing(self, request: Any) -> None:
        """This step parked the chunk of a request."""
        self.rounds += 1
        self._seen = True
        if self._request is not request:
            self._request, self._since = request, time.monotonic()

    @property
    def waits(self) -> bool:
        """Whether a chunk is parked, or was when :meth:`aborts` was asked last."""
        return self._request is not None

    def aborts(self, chunked: Any, alone: Callable[[], bool]) -> list[Any]:
        """On rank 0, before each broadcast: what has to be in it.

        The time counts from the first of the steps, without a gap, in which the chunk was parked and nothing else ran:
        an engine that is paused parks nothing.

        Args:
            chunked: the engine's chunked request, or ``None``.
            alone: whether nothing else runs.

        Returns:
            The engine's own abort of the request, once its time is over.
        """
        seen, self._seen = self._seen, False
        if not seen or chunked is not self._request or not alone():
            self._request = None
            return []
        waited = time.monotonic() - self._since
        if waited < self._limit_s:
            return []
        self._request = None
        _log.error(
            "event=parked_chunk_ended request=%s prompt_tokens=%d waited_s=%.1f why='no memory for its next chunk, with"
            " nothing else running: the limit was lowered or others fill the card; the request is aborted and what it"
            " held is free' todo='raise the limit, free the card, or raise KVCACHED_DIST_PARKED_S to wait for longer'",
            chunked.rid, len(chunked.origin_input_ids), waited,
        )  # fmt: skip
        kind = importlib.import_module("sglang.srt.managers.io_struct").AbortReq
        return [kind(rid=chunked.rid, abort_message="no memory for the next chunk of the prompt")]


__all__ = ["ParkedChunk"]

"""A fence behind the batches that the engine has launched, on all streams that they use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .gate import RetireCheck


class StreamFence:
    """Events on several CUDA streams; passed when all of them are.

    The engine runs batches on a forward stream of its own and schedules on another one; an event on the current
    stream alone would not cover a batch that is still running.

    Args:
        streams: streams of the engine.
        checks: retired runs that the device has still to confirm. Where it finds one that was not entirely free, the
            fence never passes, so nothing is unmapped; the next mark says what was wrong.

    Threads: make it in the scheduler thread; ask from any thread.
    """

    def __init__(self, streams: Iterable[Any], checks: Iterable[RetireCheck] = ()) -> None:
        self._checks = tuple(checks)
        self._events: list[Any] = [stream.record_event() for stream in streams if stream is not None]

    def done(self) -> bool:
        """Whether the work has finished. Does not block."""
        return all(event.query() for event in self._events) and all(check.confirmed() for check in self._checks)

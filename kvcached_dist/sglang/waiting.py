"""What waits in the engine's queue, as bounds that hold in every step without a walk through all of it.

The queue can be long and the engine sorts it after it was looked at, so neither its length nor its order may matter.
Requests enter it through one place of the engine, which raises the bounds; that some have left is found in rounds, a
few requests in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LOOK = 16
"""Requests that are looked at in a step."""


def queued_length(request: Any) -> int:
    """Tokens that the prefill of a request of the engine's queue has, those that are cached included."""
    return len(request.origin_input_ids) + len(request.output_ids)


class Waiting:
    """Tokens of all that waits together, and of the longest: never less than they are.

    Args:
        queue: the engine's queue as it is now.

    Attributes:
        tokens: of all together.

    Threads: the scheduler thread.
    """

    def __init__(self, queue: Sequence[Any]) -> None:
        self.tokens, self._longest = _sum_and_longest(queue)
        # A round looks at the queue as it was when the round began, and counts what has come since.
        self._round: list[Any] = []
        self._next = 0
        self._round_tokens, self._round_longest = self.tokens, self._longest

    def came(self, request: Any) -> None:
        """A request has entered the queue."""
        length = queued_length(request)
        self.tokens += length
        self._longest = max(self._longest, length)
        self._round_tokens += length
        self._round_longest = max(self._round_longest, length)

    def look(self, queue: Sequence[Any]) -> tuple[int, int]:
        """Tokens of all together and of the longest: exact for a short queue, else at most a round too high.

        Args:
            queue: the engine's queue, in whatever order.
        """
        if not queue and not self.tokens:
            return 0, 0
        if len(queue) <= LOOK:
            self.tokens, self._longest = self._round_tokens, self._round_longest = _sum_and_longest(queue)
            self._round, self._next = [], 0
            return self.tokens, self._longest
        if self._next >= len(self._round):
            self.tokens, self._longest = self._round_tokens, self._round_longest
            self._round, self._next = list(queue), 0
            self._round_tokens = self._round_longest = 0
        tokens, longest = _sum_and_longest(self._round[self._next : self._next + LOOK])
        self._next += LOOK
        self._round_tokens += tokens
        self._round_longest = max(self._round_longest, longest)
        return self.tokens, self._longest


def _sum_and_longest(requests: Sequence[Any]) -> tuple[int, int]:
    lengths = [queued_length(request) for request in requests]
    return sum(lengths), max(lengths, default=0)


__all__ = ["LOOK", "Waiting", "queued_length"]

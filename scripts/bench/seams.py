"""Timestamps at the seams of a growth on one rank, only with ``--profile``; :mod:`.parts` makes figures of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvcached_dist import Coordinator

WARM_UP_SECTION = "warm up"
GROWTH = "growth"
RECLAIM = "reclaim"
SUSTAINED = "sustained"

Note = tuple[float, str]
"""Microseconds of the monotonic clock, which all processes of a machine share; ``>seam`` (it begins), ``<seam`` (it
ends) or ``=section`` (what is noted from here on belongs to it)."""


class Profile:
    """Wraps a few methods of one coordinator and notes when they begin and end.

    Seams: ``alloc``; ``reserve`` and ``map``, the rank's own part with the admission turn and the looks at free memory;
    inside them ``native.reserve``, ``native.map`` and ``free_bytes``; ``send.<message>.<to>`` and
    ``deliver.<message>.<from>``.

    Args:
        coordinator: is watched from here to its end; ``None``: nothing is wrapped and nothing noted.

    Threads: seams are noted in whatever thread passes them.
    """

    def __init__(self, coordinator: Coordinator | None) -> None:
        self._notes: list[Note] = []
        self._enabled = coordinator is not None
        if coordinator is None:
            return
        physical = coordinator.physical
        self._wrap(coordinator, "alloc", lambda *_: "alloc")
        self._wrap(physical, "perform", lambda work: str(work.kind.value))
        self._wrap(physical, "free_bytes", lambda *_: "free_bytes")
        for name in ("reserve", "map"):
            self._wrap(physical.backing, name, lambda *_, name=name: f"native.{name}")
        agent = coordinator._agent
        self._wrap(agent.routing, "deliver", lambda peer, message: f"deliver.{type(message).__name__}.{peer}")
        for to, link in agent.links.by_rank.items():
            self._wrap(link, "send", lambda message, to=to: f"send.{type(message).__name__}.{to}")

    def mark(self, section: str) -> None:
        """What is noted from here on belongs to this section."""
        if self._enabled:
            self._note(f"={section}")

    def notes(self) -> list[Note]:
        """All notes, in order of time."""
        return sorted(self._notes, key=lambda note: note[0])

    def _note(self, text: str) -> None:
        self._notes.append((time.monotonic_ns() / 1000, text))

    def _wrap(self, target: Any, name: str, label: Callable[..., str]) -> None:
        inner = getattr(target, name)

        def wrapped(*args: Any) -> Any:
            text = label(*args)
            self._note(f">{text}")
            try:
                return inner(*args)
            finally:
                self._note(f"<{text}")

        object.__setattr__(target, name, wrapped)

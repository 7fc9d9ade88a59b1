"""Where the time of a growth goes: timestamps at the seams of one rank, taken only with ``--profile``."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from kvcached_dist import Coordinator


class Profile:
    """Wraps a few methods of one coordinator's agent and notes when they begin and end.

    Use :meth:`of`; without ``enabled`` nothing is wrapped.
    """

    def __init__(self) -> None:
        self.notes: list[tuple[float, str]] = []

    @classmethod
    def of(cls, coordinator: Coordinator, enabled: bool) -> Profile:
        profile = cls()
        if enabled:
            profile._wrap(coordinator.physical, "perform", lambda work: f"{work.kind.value}")
            for name in ("free_bytes", "handles"):
                profile._wrap(coordinator.physical, name, lambda *_, name=name: name)
            backing = coordinator.physical.backing
            for name in ("missing_bytes", "reserve", "map", "unmap", "release"):
                profile._wrap(backing, name, lambda *_, name=name: f"native.{name}")
            routing = coordinator._agent.routing
            profile._wrap(routing, "deliver", lambda peer, message: f"deliver.{type(message).__name__}")
            for link in coordinator._agent.links.by_rank.values():
                profile._wrap(link, "send", lambda message: f"send.{type(message).__name__}")
            profile._wrap(coordinator, "_foreground", lambda *_: "foreground")
            profile._wrap(coordinator, "_meet", lambda *_: "meet")
            profile._wrap(coordinator, "alloc", lambda *_: "alloc")
        return profile

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def result(self) -> list[tuple[float, str]]:
        """(microseconds, seam) in order of time; begins are marked ``>`` and ends ``<``."""
        return self.notes

    def _wrap(self, target: Any, name: str, label: Any) -> None:
        inner = getattr(target, name)
        notes = self.notes

        def wrapped(*args: Any) -> Any:
            text = label(*args)
            notes.append((time.monotonic_ns() / 1000, f">{text}"))
            try:
                return inner(*args)
            finally:
                notes.append((time.monotonic_ns() / 1000, f"<{text}"))

        object.__setattr__(target, name, wrapped)


def durations(notes: list[tuple[float, str]]) -> dict[str, list[float]]:
    """Per seam the microseconds of each passage. Seams of one name do not nest."""
    begun: dict[str, float] = {}
    spans: dict[str, list[float]] = defaultdict(list)
    for at, text in notes:
        name = text[1:]
        if text[0] == ">":
            begun[name] = at
        elif name in begun:
            spans[name].append(at - begun.pop(name))
    return dict(spans)

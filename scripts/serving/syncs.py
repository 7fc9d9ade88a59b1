"""Where the engine's steps wait for the device, from torch's own warnings (``inside/sync_places.py``).

A native step waits here and there by itself. What matters is what an elastic one adds, and whether any of it is in
this library: nothing that is done in every step may wait.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

LIBRARY = "kvcached_dist/"


@dataclass(frozen=True)
class Waits:
    """What was counted in some servers together.

    Attributes:
        steps: launched.
        places: how often steps waited, by place.
    """

    steps: int = 0
    places: Counter[str] = field(default_factory=Counter)

    def since(self, before: Waits) -> Waits:
        """What has come since then."""
        return Waits(self.steps - before.steps, self.places - before.places)

    def ours(self) -> Counter[str]:
        """The part that this library asked for."""
        return Counter({place: count for place, count in self.places.items() if LIBRARY in place})


def environment(folder: Path) -> dict[str, str]:
    """Variables with which a server counts, beside those of :func:`serving.steps.inside`."""
    return {"SYNC_PLACES": str(folder)}


def read(folder: Path, names: Iterable[str]) -> Waits:
    """What the servers with these names have written last."""
    steps, places = 0, Counter[str]()
    for name in names:
        for path in folder.glob(f"{name}-*.json"):
            found = json.loads(path.read_text())
            steps += found["steps"]
            places.update(found["places"])
    return Waits(steps, places)


def table(found: Mapping[str, Waits]) -> Table:
    """How often a step waits, by place and kind of server."""
    shown = Table(title="waits for the device in 1,000 steps", title_justify="left")
    for heading in ("place", *found):
        shown.add_column(heading, justify="right" if heading != "place" else "left")
    whole = sum((waits.places for waits in found.values()), Counter[str]())
    for place, _ in whole.most_common():
        shown.add_row(place, *(f"{1000 * waits.places[place] / max(1, waits.steps):.1f}" for waits in found.values()))
    shown.add_row("steps", *(str(waits.steps) for waits in found.values()))
    return shown


__all__ = ["Waits", "environment", "read", "table"]

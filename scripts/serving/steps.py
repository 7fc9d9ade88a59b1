"""Where the time of the engine's steps goes, from clocks inside its scheduler (``inside/sitecustomize.py``).

The medians of thousands of steps are far steadier than requests per second: what disturbs a machine for a moment moves
few of them. Steps beside driver work are kept apart.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PARTS = ("receive", "plan", "launch", "result", "decide", "processor")
"""What of a step is timed; *decide*, this library's part before the broadcast, lies inside *receive*. *processor* is
what the thread had of one: the rest of the step it waited, for the card, another thread or its turn."""

INSIDE = Path(__file__).resolve().parent / "inside"


def inside(name: str) -> dict[str, str]:
    """Variables with which a server looks at itself.

    Args:
        name: of the server's files, followed by the number of the process.
    """
    path = os.pathsep.join(filter(None, (str(INSIDE), os.environ.get("PYTHONPATH", ""))))
    return {"INSIDE_NAME": name, "PYTHONPATH": path}


def environment(folder: Path) -> dict[str, str]:
    """Variables with which a server times its steps, beside those of :func:`inside`; files go into this folder."""
    return {"STEP_TIMES": str(folder)}


def read(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Medians in milliseconds per kind of step, of the servers with these names together.

    Returns:
        Per kind (``decode after prefill, driver work beside it``): steps, their ``share`` of the whole time, the median
        from launch to launch, and those of :data:`PARTS`; ``waits``, how often the thread waited on average.
    """
    found: dict[str, list[list[float]]] = defaultdict(list)
    for name in names:
        for path in folder.glob(f"{name}-*.jsonl"):
            # The server may be in the middle of the last line.
            for line in path.read_text().rpartition("\n")[0].splitlines():
                before, prefill, drove, *times = json.loads(line)
                kind = f"{_word(prefill)} after {_word(before)}" + (", driver work beside it" if drove else "")
                found[kind].append(times)
    whole = sum(row[0] for rows in found.values() for row in rows)
    return {
        kind: {
            "steps": len(rows),
            "share": round(sum(row[0] for row in rows) / whole, 4),
            "step": _median(rows, 0),
            **{part: _median(rows, place) for place, part in enumerate(PARTS, 1)},
            "waits": round(statistics.fmean(row[-1] for row in rows), 3),
        }
        for kind, rows in sorted(found.items())
    }


def _median(rows: list[list[float]], place: int) -> float:
    return statistics.median(row[place] for row in rows)


def _word(prefill: bool) -> str:
    return "prefill" if prefill else "decode"

"""Where the wall time of a growth goes: the notes of all ranks, cut into parts that add up to it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from .samples import percentile, slowest
from .seams import GROWTH, SUSTAINED, Note

PARTS = (
    "before the first frame leaves",
    "RESERVE frames, own worker awake",
    "own reserve",
    "the slowest follower's reserve",
    "its RESERVED under way",
    "MAP frames, own worker awake",
    "own map and fill",
    "the slowest follower's map and fill",
    "its MAPPED under way",
    "verdict until ids",
)
"""Of a growth, on rank 0, in order. Waiting for followers counts from the end of this rank's own work.

In a world of one there are no frames: the first part ends where the own reserve begins, and waits are zero."""

LOCK_STEP = "lock step"
"""Beside the sections: the floor in a row, in lock step."""

FLIGHTS = (
    "RESERVE until the follower begins",
    "RESERVED until rank 0 has it",
    "MAP until the follower begins",
    "MAPPED until rank 0 has it",
)
"""Of the frames of the follower that answers last, hidden behind own work or not; in no part of their own."""


class SeamMissing(Exception):
    """A growth cannot be cut into parts; the text names the seam."""


class Window:
    """The notes of one rank between two times.

    Args:
        notes: of one rank, in order of time.
        begin: first time, microseconds.
        end: last time.
        rank: named in errors.
    """

    def __init__(self, notes: Sequence[Note], begin: float, end: float, rank: int) -> None:
        self._rank = rank
        first = bisect_left(notes, begin, key=lambda note: note[0])
        self._at: dict[str, list[float]] = {}
        for at, text in notes[first:]:
            if at > end:
                break
            self._at.setdefault(text, []).append(at)

    def once(self, seam: str) -> float:
        """When a seam was passed.

        Raises:
            SeamMissing: it was not passed, or more than once: a growth that was refused and tried again.
        """
        times = self._at.get(seam, [])
        if len(times) != 1:
            raise SeamMissing(f"{'no' if not times else len(times)} {seam} on rank {self._rank}")
        return times[0]

    def span(self, seam: str) -> tuple[float, float]:
        """Begin and end of a seam that was passed once."""
        return self.once(f">{seam}"), self.once(f"<{seam}")

    def total(self, seam: str, inside: tuple[float, float]) -> float:
        """Microseconds spent in a seam while another one lasted; none where it was not passed.

        Raises:
            SeamMissing: it began or ended outside.
        """
        begins = [at for at in self._at.get(f">{seam}", []) if inside[0] <= at <= inside[1]]
        ends = [at for at in self._at.get(f"<{seam}", []) if inside[0] <= at <= inside[1]]
        if len(begins) != len(ends):
            raise SeamMissing(f"{len(begins)} >{seam} and {len(ends)} <{seam} on rank {self._rank}")
        return sum(ends) - sum(begins)


def profile(ranks: Sequence[Sequence[Note]], expected: dict[str, int]) -> dict[str, Any]:
    """Figures of every section.

    Args:
        ranks: notes per rank, rank 0 first.
        expected: growths per section that were made.

    Returns:
        Per section ``growths`` that were made, ``cut`` of them, ``missing`` (reason -> growths left out for it), and
        in microseconds, each as p50 and mean, ``whole``, ``parts``, ``driver`` and ``flights``. Means of parts add up
        to that of the whole; p50 of parts need not. Without any cut growth there are no figures.
    """
    return {section: _section(ranks, section, expected[section]) for section in (GROWTH, SUSTAINED)}


def _section(ranks: Sequence[Sequence[Note]], section: str, expected: int) -> dict[str, Any]:
    missing: Counter[str] = Counter()
    cut: list[dict[str, dict[str, float]]] = []
    found = allocs(ranks[0], section)
    for begin, end in found:
        try:
            cut.append(growth([Window(notes, begin, end, rank) for rank, notes in enumerate(ranks)]))
        except SeamMissing as error:
            missing[str(error)] += 1
    if len(found) != expected:
        missing["no growth in an alloc of this section"] = expected - len(found)
    report: dict[str, Any] = {"growths": expected, "cut": len(cut), "missing": dict(missing)}
    if cut:
        report |= {
            group: {name: _figures([one[group][name] for one in cut]) for name in cut[0][group]} for group in cut[0]
        }
        report["whole"] = report["whole"]["whole"]
    return report


def _figures(micros: list[float]) -> dict[str, float]:
    return {"p50_us": round(percentile(micros, 0.5), 1), "mean_us": round(fmean(micros), 3)}


def allocs(notes: Sequence[Note], section: str) -> list[tuple[float, float]]:
    """Begin and end of every growth of a section."""
    now, begun = "", 0.0
    found = []
    for at, text in notes:
        if text[0] == "=":
            now = text[1:]
        elif text == ">alloc":
            begun = at
        elif text == "<alloc" and now == section:
            found.append((begun, at))
    return found


def growth(windows: Sequence[Window]) -> dict[str, dict[str, float]]:
    """One growth from the notes of all ranks.

    Returns:
        Microseconds: ``whole`` by the name ``whole``; ``parts`` by :data:`PARTS`, which add up to it; ``driver``: what
        the driver work itself took; ``flights`` by :data:`FLIGHTS`, empty for a world of one.

    Raises:
        SeamMissing: a seam that the parts need was not noted.
    """
    leader = windows[0]
    begin, end = leader.span("alloc")
    reserve, mapping = leader.span("reserve"), leader.span("map")
    reserved, mapped = _Answer.last(windows, "reserve"), _Answer.last(windows, "map")
    first = min((_frame(leader, "Reserve", rank) for rank in range(1, len(windows))), default=reserve[0])
    cuts = [begin, first, reserve[0], reserve[1]]
    cuts += _waits(cuts[-1], reserved)
    cuts += [mapping[0], mapping[1]]
    cuts += _waits(cuts[-1], mapped)
    cuts.append(end)
    flights = {}
    if reserved is not None and mapped is not None:
        figures = (reserved.ordered, reserved.answered, mapped.ordered, mapped.answered)
        flights = dict(zip(FLIGHTS, figures, strict=True))
    return {
        "whole": {"whole": end - begin},
        "parts": dict(zip(PARTS, (later - earlier for earlier, later in pairwise(cuts)), strict=True)),
        "driver": driver(windows),
        "flights": flights,
    }


def driver(windows: Sequence[Window]) -> dict[str, float]:
    """Microseconds of the driver work of one growth, and of what surrounds the creates on the same rank."""
    reserves, maps, turns, looks = [], [], [], []
    for window in windows:
        outer, inner, map_inner = window.span("reserve"), window.span("native.reserve"), window.span("native.map")
        look = window.total("free_bytes", outer)
        reserves.append(inner[1] - inner[0])
        maps.append(map_inner[1] - map_inner[0])
        looks.append(look)
        turns.append(outer[1] - outer[0] - reserves[-1] - look)
    return {
        "reserve, slowest rank": max(reserves),
        "reserve, mean of ranks": fmean(reserves),
        "map and fill, slowest rank": max(maps),
        "map and fill, mean of ranks": fmean(maps),
        "turn and Python around reserve, slowest rank": max(turns),
        "looks at free memory, slowest rank": max(looks),
    }


def floor_figures(
    whole: Sequence[Sequence[float]],
    reserve: Sequence[Sequence[float]],
    mapping: Sequence[Sequence[float]],
    *,
    meets: bool,
) -> dict[str, Any]:
    """The floor's figures under the names of ours.

    Args:
        whole: microseconds per rank and growth.
        reserve: the reserve of it.
        mapping: map and fill of it.
        meets: ranks wait for each other at every growth, so the slowest of each growth counts. Else the rank that took
            longest over all of them: the maximum of each growth would be what a lock step costs.

    Returns:
        ``whole`` of the slowest rank, and ``driver``.
    """
    slow = slowest if meets else _longest
    figures = {"reserve": reserve, "map and fill": mapping}
    driver: dict[str, Any] = {}
    for name, per_rank in figures.items():
        driver[f"{name}, slowest rank"] = _figures(slow(per_rank))
        driver[f"{name}, mean of ranks"] = _figures([fmean(values) for values in zip(*per_rank, strict=True)])
    return {"whole": _figures(slow(whole)), "driver": driver}


def _longest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    return list(max(per_rank, key=sum))


class _Answer:
    """The answer that rank 0 has last, and the work of the follower that sent it."""

    def __init__(self, ordered: float, work: tuple[float, float], arrived: float) -> None:
        self.ordered = work[0] - ordered
        """From the frame to the begin of the work."""
        self.answered = arrived - work[1]
        """From the end of the work until rank 0 has the answer."""
        self.work_end = work[1]
        self.arrived = arrived

    @classmethod
    def last(cls, windows: Sequence[Window], work: str) -> _Answer | None:
        """Of all followers; ``None`` in a world of one."""
        leader = windows[0]
        order, answer = {"reserve": ("Reserve", "Reserved"), "map": ("Map", "Mapped")}[work]
        answers = [
            cls(_frame(leader, order, rank), window.span(work), leader.once(f">deliver.{answer}.{rank}"))
            for rank, window in enumerate(windows)
            if rank
        ]
        return max(answers, key=lambda one: one.arrived, default=None)


def _frame(leader: Window, message: str, rank: int) -> float:
    return leader.once(f">send.{message}.{rank}")


def _waits(own_end: float, answer: _Answer | None) -> list[float]:
    """When the slowest follower's work has ended and when its answer is here, neither before the own work's end."""
    if answer is None:
        return [own_end, own_end]
    worked = max(own_end, answer.work_end)
    return [worked, max(worked, answer.arrived)]

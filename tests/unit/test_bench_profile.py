"""Where the time of a growth goes: parts that add up, and a seam that is not there is said."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from kvcached_dist import _native
from scripts.bench import parts, plan, tables, world
from scripts.bench.floor import Floor
from scripts.bench.meeting import Meeting
from scripts.bench.protocol import Protocol
from scripts.bench.seams import GROWTH, RECLAIM, SUSTAINED, WARM_UP_SECTION, Note, Profile

ALLOC_US = 1000.0
FOLLOWER = {"reserve": (150.0, 260.0), "map": (420.0, 760.0)}
"""Begin and end of the follower's own work, from the begin of the alloc."""

LEADER: list[Note] = [
    (0, ">alloc"), (100, ">send.Reserve.1"), (110, "<send.Reserve.1"),
    (130, ">reserve"), (135, ">free_bytes"), (140, "<free_bytes"), (145, ">native.reserve"), (195, "<native.reserve"),
    (196, ">free_bytes"), (199, "<free_bytes"), (200, "<reserve"),
    (300, ">deliver.Reserved.1"), (310, ">send.Map.1"), (325, "<send.Map.1"), (330, "<deliver.Reserved.1"),
    (340, ">map"), (345, ">native.map"), (645, "<native.map"), (650, "<map"),
    (800, ">deliver.Mapped.1"), (820, "<deliver.Mapped.1"), (ALLOC_US, "<alloc"),
]  # fmt: skip


def follower(begin: float = 0.0, **work: tuple[float, float]) -> list[Note]:
    notes: list[Note] = []
    for seam, (began, ended) in {**FOLLOWER, **work}.items():
        notes += [
            (begin + began, f">{seam}"), (begin + began + 5, f">native.{seam}"),
            (begin + ended - 5, f"<native.{seam}"), (begin + ended, f"<{seam}"),
        ]  # fmt: skip
    return notes


def at(begin: float, notes: list[Note]) -> list[Note]:
    return [(begin + time, text) for time, text in notes]


def windows(leader: list[Note], *followers: list[Note]) -> list[parts.Window]:
    return [parts.Window(notes, 0, ALLOC_US, rank) for rank, notes in enumerate((leader, *followers))]


def rank_notes(growths: int) -> tuple[list[Note], list[Note]]:
    """A warm-up that took long, growths alone, their reclaims, and as many growths in a row; both ranks."""
    leader: list[Note] = [(0, f"={WARM_UP_SECTION}"), (1, ">alloc"), (90_000, "<alloc"), (90_000, f"={RECLAIM}")]
    other: list[Note] = []
    for number in range(2 * growths):
        begin = 100_000.0 + 2000 * number
        alone = number < growths
        if alone or number == growths:
            leader.append((begin - 1, f"={GROWTH if alone else SUSTAINED}"))
        leader += at(begin, LEADER)
        other += follower(begin)
        if alone:
            leader += [(begin + 1001, f"={RECLAIM}"), (begin + 1500, ">deliver.Drained.1")]
    return leader, other


def test_parts_are_where_the_time_went() -> None:
    cut = parts.growth(windows(LEADER, follower()))
    assert list(cut["parts"].values()) == [100, 30, 70, 60, 40, 40, 310, 110, 40, 200]
    assert sum(cut["parts"].values()) == cut["whole"]["whole"] == ALLOC_US
    assert list(cut["flights"].values()) == [50, 40, 110, 40]
    assert cut["driver"] == {
        "reserve, slowest rank": 100, "reserve, mean of ranks": 75,
        "map and fill, slowest rank": 330, "map and fill, mean of ranks": 315,
        "turn and Python around reserve, slowest rank": 12, "looks at free memory, slowest rank": 8,
    }  # fmt: skip


def test_nothing_is_waited_for_where_the_own_work_ends_last() -> None:
    early = [note for note in LEADER if note[1] != ">deliver.Mapped.1"] + [(600.0, ">deliver.Mapped.1")]
    cut = parts.growth(windows(sorted(early), follower(map=(420.0, 580.0))))["parts"]
    assert (cut["the slowest follower's map and fill"], cut["its MAPPED under way"]) == (0, 0)
    assert cut["verdict until ids"] == 350
    assert sum(cut.values()) == ALLOC_US


def test_the_follower_that_answers_last_is_the_slowest() -> None:
    second = [(time, text.replace(".1", ".2")) for time, text in LEADER if text.endswith(".1")]
    leader = sorted(LEADER + [(time + (40 if "Mapped" in text else -1), text) for time, text in second])
    cut = parts.growth(windows(leader, follower(), follower(map=(420.0, 700.0))))
    assert cut["parts"]["before the first frame leaves"] == 99
    assert cut["parts"]["the slowest follower's map and fill"] == 50
    assert cut["parts"]["its MAPPED under way"] == 140
    assert sum(cut["parts"].values()) == ALLOC_US


def test_a_world_of_one_has_neither_frames_nor_followers() -> None:
    alone = [note for note in LEADER if "send" not in note[1] and "deliver" not in note[1]]
    cut = parts.growth(windows(alone))
    assert list(cut["parts"].values()) == [130, 0, 70, 0, 0, 140, 310, 0, 0, 350]
    assert cut["flights"] == {}


@pytest.mark.parametrize("seam", sorted({text for _, text in LEADER[1:-1] if text[0] == ">" and "free" not in text}))
def test_a_missing_seam_is_said_and_not_zero(seam: str) -> None:
    leader, other = rank_notes(3)
    lost = next(note for note in leader if note[1] == seam and note[0] > 100_000)
    leader.remove(lost)
    found = parts.profile([leader, other], {GROWTH: 3, SUSTAINED: 3})
    assert found[GROWTH]["missing"] == {f"no {seam} on rank 0": 1}
    assert found[GROWTH]["cut"] == 2
    assert found[SUSTAINED]["missing"] == {}


def test_a_growth_that_was_tried_twice_and_a_look_without_an_end_are_said() -> None:
    twice = sorted([*LEADER, (205.0, ">reserve")])
    with pytest.raises(parts.SeamMissing, match="2 >reserve on rank 0"):
        parts.growth(windows(twice, follower()))
    with pytest.raises(parts.SeamMissing, match="2 >free_bytes and 1 <free_bytes on rank 0"):
        parts.growth(windows([note for note in LEADER if note != (140, "<free_bytes")], follower()))


def test_sections_are_apart_and_an_alloc_without_growth_is_said() -> None:
    found = parts.profile(rank_notes(3), {GROWTH: 3, SUSTAINED: 5})
    assert found[GROWTH]["whole"] == {"p50_us": 1000.0, "mean_us": 1000.0}
    assert (found[GROWTH]["cut"], found[GROWTH]["missing"]) == (3, {})
    assert (found[SUSTAINED]["cut"], found[SUSTAINED]["growths"]) == (3, 5)
    assert found[SUSTAINED]["missing"] == {"no growth in an alloc of this section": 2}


def test_followers_without_notes_leave_no_figures() -> None:
    leader, _ = rank_notes(2)
    found = parts.profile([leader, []], {GROWTH: 2, SUSTAINED: 2})
    assert "parts" not in found[GROWTH]
    assert found[GROWTH]["missing"] == {"no >reserve on rank 1": 2}


def part_of_rank(notes: list[Note]) -> dict[str, Any]:
    cell = plan.Cell(2, 43, 16, 1 << 20, 2, 2)
    floor = {"grow_us": [9.0, 9.0], "reserve_us": [2.0, 2.0], "reclaim_us": [1.0, 1.0], "sustained_us": [8.0, 8.0]}
    return {
        "cell": {
            "ranks": 2, "layers": 43, "run_pages": 16, "page_bytes": 1 << 20, "useful_bytes": cell.useful_bytes,
            "repeats": 2, "sustained_runs": 2,
        },
        "floor": {**floor, "sustained_reserve_us": [3.0, 3.0], "extents": 0, "extents_sustained": 0},
        "extent_bytes": [],
        "lock_step": {"sustained_us": [12.0, 12.0], "reserve_us": [3.0, 4.0], "map_us": [5.0, 6.0]},
        "ours": {"grow_us": [1000.0, 1000.0], "reclaim_us": [1.0], "sustained_us": [1000.0, 1000.0]},
        "notes": notes,
    }  # fmt: skip


def test_the_table_shows_both_sides_and_what_is_missing_and_the_raw_notes_go() -> None:
    leader, other = rank_notes(2)
    leader.remove(next(note for note in leader if note[1] == ">map"))
    cell = world.joined([part_of_rank(leader), part_of_rank(other)])
    assert "notes" not in cell
    floor = cell["profile"]["floor"]
    assert floor[SUSTAINED]["driver"]["map and fill, slowest rank"] == {"p50_us": 5.0, "mean_us": 5.0}
    assert floor[parts.LOCK_STEP]["driver"]["map and fill, slowest rank"]["mean_us"] == 5.5
    said = io.StringIO()
    tables.profile(Console(file=said, width=180), cell)
    assert "growth: 1 of 2 growths are left out: no >map on rank 0" in said.getvalue()
    assert "MAPPED until rank 0 has it" in said.getvalue()


def test_ranks_that_do_not_meet_are_not_counted_as_if_they_waited_for_each_other() -> None:
    """Each is slow once: in lock step both growths take 9, in a row without it each rank has done both after 10."""
    ranks = ([9.0, 1.0], [1.0, 9.0])
    for meets, mean in ((True, 9.0), (False, 5.0)):
        found = parts.floor_figures(ranks, ranks, ranks, meets=meets)
        slow = [found["whole"], found["driver"]["reserve, slowest rank"], found["driver"]["map and fill, slowest rank"]]
        assert [figure["mean_us"] for figure in slow] == [mean] * 3
    one, other = part_of_rank([]), part_of_rank([])
    one["floor"]["sustained_us"], other["floor"]["sustained_us"] = [9.0, 4.0], [4.0, 10.0]
    cell = world.joined([one, other])
    row = cell["profile"]["floor"][SUSTAINED]["whole"]["mean_us"]
    assert row * cell["sustained_runs"] == cell["floor"]["sustained_us"] == 14


class Alone:
    """A barrier of one process that counts."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, _seconds: float) -> None:
        self.waits += 1


@pytest.mark.slow
def test_a_real_growth_is_cut_and_the_floor_in_lock_step_meets_twice_per_growth() -> None:
    cell = plan.Cell(1, 43, 4, 998208, 3, 2)
    stage = plan.model_of(43, cell.pages + 1).stage(0, 1)
    barrier = Alone()
    device = _native.HostDevice(4 << 30)
    floor = Floor(device, stage, Meeting(barrier))
    try:
        assert all(len(series) == 2 for series in floor.lock_step(cell).values())
        assert barrier.waits == 2 * 2 + 2 * cell.sustained  # a meeting with a pause waits twice, before and after
    finally:
        floor.close()
    protocol = Protocol(cell, 0, device, stage, None, lambda: None)
    try:
        profile = Profile(protocol.coordinator)
        protocol.measure(profile.mark)
    finally:
        protocol.close()
    found = parts.profile([profile.notes()], {GROWTH: 3, SUSTAINED: 2})
    for section in (GROWTH, SUSTAINED):
        assert found[section]["missing"] == {}
        total = sum(figure["mean_us"] for figure in found[section]["parts"].values())
        assert total == pytest.approx(found[section]["whole"]["mean_us"], abs=0.1)
        assert found[section]["driver"]["map and fill, slowest rank"]["mean_us"] > 0


def test_without_a_profile_nothing_is_noted() -> None:
    profile = Profile(None)
    profile.mark(GROWTH)
    assert profile.notes() == []

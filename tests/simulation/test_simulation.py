"""A small run of the simulation, and what a run promises: it repeats, it reaches everything, it reduces a failure."""

from __future__ import annotations

import random

import pytest

from kvcached_dist.coord.core.participant import Participant

from . import mutants, mutation
from .cluster import Cluster
from .runner import EVENTS_MEDIAN_MIN, Failure, Variant, attempt, run_chunk, shrink, table
from .schedule import CELLS, PHASES, directed, draw

DIRECTED = range(len(directed()))
STRIPES = 8


@pytest.mark.slow
@pytest.mark.parametrize("stripe", range(STRIPES))
def test_directed_schedules_hit_their_cells(stripe: int) -> None:
    numbers = DIRECTED[stripe::STRIPES]
    summary = run_chunk([Variant(number, is_directed=True) for number in numbers])
    assert [failure.text for failure in summary.failures] == []
    wanted = {tuple(directed()[number].directed.split("@")) for number in numbers}
    assert wanted - set(summary.hits) == set()


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_restarted_rank_rejoins_in_every_phase(phase: str) -> None:
    plan = next(plan for plan in directed() if plan.directed == f"rejoin@{phase}")
    report = Cluster(plan).run()
    assert report.hits["rejoin", phase] == report.epochs == 1
    assert report.calm, "the world goes on and gives everything back"


@pytest.mark.slow
@pytest.mark.parametrize("stripe", range(4))
def test_random_schedules(stripe: int) -> None:
    summary = run_chunk([Variant(1000 * stripe + number) for number in range(60)])
    assert [f"{failure.variant.command()}: {failure.text}" for failure in summary.failures] == []
    assert summary.median_events() >= EVENTS_MEDIAN_MIN
    assert summary.calm > 30


def test_every_cell_has_one_directed_schedule() -> None:
    cells = [f"{kind}@{phase}" for kind, phases in CELLS.items() for phase in phases]
    assert sorted(plan.directed for plan in directed()) == sorted(cells)
    assert {phase for phases in CELLS.values() for phase in phases} == set(PHASES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 77, 123456])
def test_equal_seeds_give_equal_traces(seed: int) -> None:
    first = Cluster(draw(seed)).run()
    random.seed(seed + 1)
    second = Cluster(draw(seed)).run()
    other = Cluster(draw(seed + 1)).run()
    assert (first.digest, first.events) == (second.digest, second.events)
    assert first.digest != other.digest


@pytest.mark.slow
def test_a_failure_is_reduced_to_a_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Participant, "quiet_txn", lambda self: self.newest_txn)
    failures = (attempt(Variant(seed))[1] for seed in range(400))
    failure = next(outcome for outcome in failures if isinstance(outcome, Failure))
    smallest = shrink(failure)
    assert smallest.rule == failure.rule
    assert smallest.lines
    assert smallest.variant.command().startswith(f"scripts/sim --replay {failure.variant.seed}")
    again = attempt(smallest.variant)[1]
    assert isinstance(again, Failure)
    assert again.text == smallest.text


def test_the_table_has_a_row_for_each_fault() -> None:
    lines = table(run_chunk([]).hits).splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(CELLS)


def test_mutants_still_apply() -> None:
    wrong = [mutant.name for mutant in mutants.ALL if (mutation.ROOT / mutant.file).read_text().count(mutant.old) != 1]
    assert wrong == []
    names = [mutant.name for mutant in mutants.ALL]
    assert len(names) == len(set(names)) >= 25
    assert {f"M{number}" for number in range(3, 10)} <= {mutant.rule.split(":")[0] for mutant in mutants.ALL}

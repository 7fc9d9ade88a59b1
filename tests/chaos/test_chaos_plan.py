"""The plan: reproducible, complete, and within the bounds that its kinds promise."""

from __future__ import annotations

from collections import Counter

import pytest

from kvcached_dist.chaos.plan import DROPPED, Effect, Fault, Kind, Means, make_plan
from kvcached_dist.fault_specs import DRIVER_CALLS, POINTS, FaultSpec

LEASE_S = 5.0


def plan(faults: int, seed: int = 1, world_size: int = 4) -> tuple[Fault, ...]:
    return make_plan(faults, seed, world_size, LEASE_S, growth_deadline_s=2.0)


def test_equal_seeds_give_equal_plans_and_others_do_not() -> None:
    assert plan(100) == plan(100)
    assert plan(100, seed=2) != plan(100)


def test_a_longer_plan_begins_like_a_shorter_one() -> None:
    assert plan(200)[:40] == plan(40)


def test_a_short_plan_has_every_kind_once() -> None:
    assert Counter(fault.kind for fault in plan(len(Kind))) == dict.fromkeys(Kind, 1)


def test_two_hundred_faults_kill_both_roles_at_every_point() -> None:
    faults = plan(200)
    for kind in (Kind.KILL_FOLLOWER, Kind.KILL_LEADER):
        points = {FaultSpec.parse(fault.spec).at for fault in faults if fault.kind is kind}
        assert points == set(POINTS), kind
    assert {fault.kind for fault in faults} == set(Kind)


def test_every_driver_call_is_refused_and_every_answer_dropped() -> None:
    specs = [FaultSpec.parse(fault.spec) for fault in plan(60) if fault.spec]
    assert {spec.op for spec in specs} >= set(DRIVER_CALLS)
    assert {spec.message for spec in specs if spec.op == "drop"} == set(DROPPED)


@pytest.mark.parametrize("world_size", [2, 4, 16])
def test_faults_hit_the_role_that_they_name(world_size: int) -> None:
    for fault in plan(150, world_size=world_size):
        assert fault.rank < world_size
        if fault.spec:
            assert FaultSpec.parse(fault.spec).rank == fault.rank
        if fault.effect is Effect.REJOINS:
            assert fault.rank > 0, fault
        if fault.effect is Effect.RESTARTS and fault.means is not Means.STORE:
            assert fault.rank == 0, fault


def test_stops_are_shorter_or_longer_than_the_lease_as_they_say() -> None:
    stops = [fault for fault in plan(300) if fault.stop_s]
    assert {fault.wakes for fault in stops if fault.effect is not Effect.SURVIVES} == {True, False}
    for fault in stops:
        assert (fault.stop_s < LEASE_S) == (fault.effect is Effect.SURVIVES), fault
        if fault.spec:
            assert FaultSpec.parse(fault.spec).seconds == fault.stop_s


def test_refusals_are_too_few_in_a_row_to_quarantine_a_run() -> None:
    refusals = [FaultSpec.parse(f.spec) for f in plan(300) if f.kind.value.startswith("refuse")]
    assert {spec.count for spec in refusals} == {1, 2}


def test_a_fault_says_what_it_is() -> None:
    for fault in plan(len(Kind)):
        assert str(fault).startswith(f"{fault.number} {fault.kind.value}")
        assert fault.spec in str(fault)

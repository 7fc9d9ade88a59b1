"""Fault specs, the injector of one rank, and the journal of what fired."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcached_dist.coord.core.errors import ConfigError
from kvcached_dist.faults import DRIVER_CALLS, MESSAGES, POINTS, FaultPlan, FaultSpec, Injector, Journal


class RecordingHook:
    """Stands in for the native fault hook: remembers what was armed, hits what it is told."""

    def __init__(self) -> None:
        self.armed: list[tuple[str, int, int, int, bool]] = []
        self.counts = dict.fromkeys(DRIVER_CALLS, 0)
        self.cleared = 0

    def arm(self, call: str, nth: int, count: int = 1, delay_us: int = 0, fail: bool = True) -> None:
        self.armed.append((call, nth, count, delay_us, fail))

    def clear(self) -> None:
        self.cleared += 1

    def hits(self) -> dict[str, int]:
        return dict(self.counts)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("rank=1,op=create,nth=37", FaultSpec(1, "create", nth=37)),
        ("rank=1,op=create,nth=37,count=2", FaultSpec(1, "create", nth=37, count=2)),
        (" rank = 2 , op=kill, at=reserve ", FaultSpec(2, "kill", at="reserve")),
        ("rank=1,op=hang,at=mapped,seconds=3", FaultSpec(1, "hang", at="mapped", seconds=3)),
        ("op=drop,rank=1,message=MAP_FAILED,nth=2", FaultSpec(1, "drop", message="MAP_FAILED", nth=2)),
        ("rank=1,op=slow,call=map,ms=50", FaultSpec(1, "slow", call="map", ms=50)),
        ("rank=0,op=slow,at=mapped,ms=0.5,count=3", FaultSpec(0, "slow", at="mapped", ms=0.5, count=3)),
    ],
)
def test_a_fault_is_read_and_written_back(text: str, spec: FaultSpec) -> None:
    assert FaultSpec.parse(text) == spec
    assert FaultSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("op", DRIVER_CALLS)
def test_every_driver_call_can_fail(op: str) -> None:
    assert FaultSpec.parse(f"rank=0,op={op},nth=1").op == op


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_can_be_killed_and_hung_at_every_point(point: str) -> None:
    assert FaultSpec.parse(f"rank=0,op=kill,at={point}").at == point
    assert FaultSpec.parse(f"rank=0,op=hang,at={point},seconds=1").at == point


def test_the_messages_of_the_protocol_can_be_dropped() -> None:
    assert {"RESERVED", "REFUSED", "MAPPED", "MAP_FAILED", "DRAINED", "UNMAPPED", "RELEASED", "MARK"} <= MESSAGES
    assert "TXN" not in MESSAGES


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "'' is not key=value"),
        ("rank=1", "op is missing"),
        ("op=create,nth=1", "rank is missing"),
        ("rank=1,op=explode", "op=explode is not one of create, map"),
        ("rank=-1,op=create", "rank=-1 is not from 0"),
        ("rank=one,op=create", "rank=one is not a whole number"),
        ("rank=1,op=create,nth=0", "nth=0 is not from 1"),
        ("rank=1,op=create,nth=1.5", "nth=1.5 is not a whole number"),
        ("rank=1,op=create,nth", "'nth' is not key=value"),
        ("rank=1,op=create,nth=", "'nth=' is not key=value"),
        ("rank=1,rank=2,op=create", "rank is given twice"),
        ("rank=1,op=create,at=map", "op=create has no at"),
        ("rank=1,op=kill", "at is missing"),
        ("rank=1,op=kill,at=lunch", "at=lunch is not one of reserve, reserved"),
        ("rank=1,op=kill,at=map,count=2", "op=kill has no count"),
        ("rank=1,op=hang,at=map", "seconds is missing"),
        ("rank=1,op=hang,at=map,seconds=0", "seconds=0 is not from 0.001 to 3600"),
        ("rank=1,op=hang,at=map,seconds=nan", "seconds=nan is not from 0.001 to 3600"),
        ("rank=1,op=drop", "message is missing"),
        ("rank=1,op=drop,message=HELP", "message=HELP is not one of ABORT"),
        ("rank=1,op=slow,ms=5", "call is missing"),
        ("rank=1,op=slow,call=kill,ms=5", "call=kill is not one of create"),
        ("rank=1,op=slow,call=map,at=map,ms=5", "call and at exclude one another"),
        ("rank=1,op=slow,call=map", "ms is missing"),
    ],
)
def test_a_bad_fault_is_named_with_one_that_works(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FaultSpec.parse(text)
    line = str(caught.value)
    assert line.startswith(f"fault {text!r}: {what}")
    assert "\n" not in line
    FaultSpec.parse(line.partition("; for example ")[2])


def test_a_plan_knows_its_world() -> None:
    plan = FaultPlan.parse(["rank=1,op=create,nth=1", "rank=3,op=kill,at=map"], world_size=4)
    assert [spec.op for spec in plan.for_rank(3)] == ["kill"]
    assert plan.for_rank(0) == ()
    assert plan
    assert not FaultPlan.parse([])
    with pytest.raises(ConfigError, match=r"rank=4 is not in a world of 4; for example rank=3"):
        FaultPlan.parse(["rank=4,op=create,nth=1"], world_size=4)


def test_driver_faults_arm_the_hook_of_their_rank_only(tmp_path: Path) -> None:
    plan = FaultPlan.parse(
        ["rank=1,op=create,nth=37,count=2", "rank=0,op=map,nth=1", "rank=1,op=slow,call=map,ms=2.5,nth=3"]
    )
    hook, journal = RecordingHook(), tmp_path / "faults.jsonl"
    injector = Injector(plan, 1, str(journal))
    assert hook.armed == []
    injector.arm(hook)
    assert hook.armed == [("create", 37, 2, 0, True), ("map", 3, 1, 2500, False)]
    assert injector.collect() == 0
    hook.counts["create"] = 2
    injector.step = 9
    assert injector.collect() == 2
    assert injector.collect() == 2
    injector.close()
    injector.close()
    assert hook.cleared == 1
    [fired] = Journal.read(str(journal))
    assert (fired.rank, fired.step, fired.fault, fired.spec, fired.hits) == (
        1, 9, "driver", "rank=1,op=create,nth=37,count=2", 2,
    )  # fmt: skip


def test_the_nth_message_is_dropped_and_only_that(tmp_path: Path) -> None:
    injector = Injector(FaultPlan.parse(["rank=0,op=drop,message=RESERVED,nth=2,count=2"]), 0, str(tmp_path / "j"))
    assert not injector.drops("RESERVED"), "not armed yet: does not count"
    injector.arm(None)
    assert [injector.drops("RESERVED") for _ in range(5)] == [False, True, True, False, False]
    assert not injector.drops("MAPPED")
    injector.close()
    assert [fired.fault for fired in Journal.read(str(tmp_path / "j"))] == ["drop", "drop"]


def test_a_slow_point_delays(tmp_path: Path) -> None:
    injector = Injector(FaultPlan.parse(["rank=0,op=slow,at=mapped,ms=20,nth=2"]), 0)
    injector.arm(None)
    durations = []
    for _ in range(3):
        started = time.monotonic()
        injector.at("mapped")
        durations.append(time.monotonic() - started)
    assert durations[1] >= 0.02
    assert max(durations[0], durations[2]) < 0.02


@pytest.mark.parametrize("plan", [None, FaultPlan(), FaultPlan.parse(["rank=5,op=kill,at=map"])])
def test_without_faults_nothing_is_armed_opened_or_counted(plan: FaultPlan | None, tmp_path: Path) -> None:
    hook, journal = RecordingHook(), tmp_path / "faults.jsonl"
    injector = Injector(plan, 0, str(journal))
    injector.arm(hook)
    for point in POINTS:
        injector.at(point)
    assert not any(injector.drops(message) for message in MESSAGES)
    assert injector.collect() == 0
    injector.close()
    assert not injector.active
    assert (hook.armed, hook.cleared) == ([], 0)
    assert not journal.exists()


def test_faults_of_an_open_plan_can_be_replaced_while_it_runs(tmp_path: Path) -> None:
    hook, journal = RecordingHook(), tmp_path / "faults.jsonl"
    injector = Injector(FaultPlan(open=True), 1, str(journal))
    injector.arm(hook)
    assert injector.active
    assert not injector.drops("RESERVED")
    specs = [FaultSpec.parse(f"rank={rank},op=drop,message=RESERVED,nth=2") for rank in (0, 1)]
    injector.rearm(specs, hook)
    assert [injector.drops("RESERVED") for _ in range(3)] == [False, True, False]
    injector.rearm([FaultSpec.parse("rank=1,op=create,nth=4")], hook)
    assert hook.armed == [("create", 4, 1, 0, True)]
    hook.counts["create"] = 1
    injector.rearm([], hook)
    assert not any(injector.drops("RESERVED") for _ in range(3))
    injector.close()
    assert [fired.fault for fired in Journal.read(str(journal))] == ["drop", "driver"]


def test_faults_of_a_closed_plan_cannot(tmp_path: Path) -> None:
    injector = Injector(FaultPlan.parse(["rank=1,op=create,nth=4"]), 1)
    with pytest.raises(RuntimeError, match=r"FaultPlan\(open=True\)"):
        injector.rearm([], None)


def test_an_unusable_journal_is_refused_at_start(tmp_path: Path) -> None:
    plan = FaultPlan.parse(["rank=0,op=kill,at=map"])
    with pytest.raises(ConfigError, match="KVCACHED_DIST_FAULT_JOURNAL=/nonexistent/j"):
        Injector(plan, 0, "/nonexistent/j")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="KVCACHED_DIST_FAULT_JOURNAL"):
        Injector(plan, 0, str(tmp_path / "link"))


def test_a_journal_that_is_not_there_or_not_finished_reads_as_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "j"
    assert Journal.read(str(path)) == []
    path.write_text(
        '{"time_s": 1.0, "rank": 0, "step": 2, "fault": "drop", "spec": "s", "hits": 1}\n{"time_s": 2.0, "ra'
    )
    assert [fired.step for fired in Journal.read(str(path))] == [2]


RANK = """
import sys, threading
from kvcached_dist.faults import FaultPlan, Injector
injector = Injector(FaultPlan.parse([sys.argv[1]]), 0, sys.argv[2])
injector.arm(None)
injector.step = 5
print("go", flush=True)
# Points are passed in the worker thread of a rank, not in the main thread.
worker = threading.Thread(target=injector.at, args=("map",))
worker.start()
worker.join()
print("on", flush=True)
"""


def start_rank(spec: str, journal: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RANK, spec, str(journal)], stdout=subprocess.PIPE)


@pytest.mark.slow
def test_a_killed_rank_dies_at_the_point_with_its_journal_written(tmp_path: Path) -> None:
    rank = start_rank("rank=0,op=kill,at=map", tmp_path / "j")
    output, _ = rank.communicate(timeout=30)
    assert (rank.returncode, output) == (-signal.SIGKILL, b"go\n")
    [fired] = Journal.read(str(tmp_path / "j"))
    assert (fired.fault, fired.step, fired.spec) == ("kill", 5, "rank=0,op=kill,at=map,nth=1")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_state(pid: int, state: str) -> float:
    deadline = time.monotonic() + 30
    while state_of(pid) != state:
        assert time.monotonic() < deadline, f"process {pid} is {state_of(pid)}, not {state}"
        time.sleep(0.002)
    return time.monotonic()


@pytest.mark.slow
def test_a_hung_rank_stands_still_for_its_time_and_goes_on(tmp_path: Path) -> None:
    rank = start_rank("rank=0,op=hang,at=map,seconds=0.3", tmp_path / "j")
    stopped = wait_for_state(rank.pid, "T")
    output, _ = rank.communicate(timeout=30)
    assert time.monotonic() - stopped > 0.2
    assert (rank.returncode, output) == (0, b"go\non\n")
    fired = Journal.read(str(tmp_path / "j"))
    assert [line.fault for line in fired] == ["hang", "resumed"]
    assert fired[1].time_s - fired[0].time_s >= 0.3


@pytest.mark.slow
def test_the_helper_of_a_hang_leaves_with_the_killed_rank(tmp_path: Path) -> None:
    # The helper is re-parented to this process or to init when its parent dies; it must go long before 60 s.
    rank = start_rank("rank=0,op=hang,at=map,seconds=60", tmp_path / "j")
    wait_for_state(rank.pid, "T")
    [helper] = helpers_of(rank.pid)
    rank.kill()
    rank.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{helper}").exists() and state_of(int(helper)) != "Z":
        assert time.monotonic() < deadline, "the helper outlived the rank"
        time.sleep(0.005)
    try:
        os.waitpid(int(helper), 0)
    except ChildProcessError:
        assert not Path(f"/proc/{helper}").exists() or state_of(int(helper)) == "Z"


def helpers_of(pid: int) -> list[str]:
    """Children of all threads: the helper was started by a worker thread."""
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]

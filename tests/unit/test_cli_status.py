"""``kvcached-dist status``: what an operator and a script see, and how mistakes are answered."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcached_dist.cli import app, main
from kvcached_dist.cli.status import size
from kvcached_dist.coord.core.errors import ConfigError, WaitTimeout
from kvcached_dist.snapshot import SnapshotWriter
from kvcached_dist.snapshot_file import file_path

from .snapshots import PAGE, state
from .test_snapshot import DEAD, plant


@pytest.fixture
def engines(tmp_path: Path) -> Any:
    """A live rank 0 and a dead rank 1 of one engine of four ranks."""
    writer = SnapshotWriter.open(str(tmp_path), "demo", 0)
    writer.publish(state())
    plant(tmp_path, "demo", 1, DEAD, json.dumps(state(failure="rank 1: rank lost [link]")).encode())
    yield tmp_path
    writer.close()


def test_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"No engine runs here: no snapshot in {tmp_path}.\n"
    assert main(["status", "--json", "--state-dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["engines"] == []


def test_pools_that_stay_with_the_engine_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = SnapshotWriter.open(str(tmp_path), "demo", 0)
    writer.publish(state(runtime_pools={"draft.token_to_kv_pool.kv_buffer": 3 << 20, "b[x]": 512}))
    try:
        assert main(["status", "--state-dir", str(tmp_path)]) == 0
    finally:
        writer.close()
    printed = capsys.readouterr().out
    assert (
        "rank 0: stays with the engine, subtracted from the budget: b[x] 512 B,"
        " draft.token_to_kv_pool.kv_buffer 3.0 MiB\n"
    ) in printed


def test_an_engine_that_stayed_native_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = SnapshotWriter.open(str(tmp_path), "demo", 0)
    why = "rank 0: not supported: recurrent state"
    pools = {"token_to_kv_pool.k_buffer": 3 << 20}
    writer.publish({"tp": 1, "pp": 1, "pools": {}, "runtime_pools": pools, "native_because": why})
    try:
        assert main(["status", "--state-dir", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert main(["status", "--json", "--state-dir", str(tmp_path)]) == 0
    finally:
        writer.close()
    assert f"rank 0: nothing is elastic: {why}\n" in printed
    assert "rank 0: native pools: token_to_kv_pool.k_buffer 3.0 MiB\n" in printed
    assert json.loads(capsys.readouterr().out)["engines"][0]["ranks"][0]["state"]["native_because"] == why


def test_the_tables(engines: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["status", "--state-dir", str(engines)]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    words = [line.split() for line in lines]
    assert words[0] == ["demo", "partly", "dead", "TP=2", "PP=2", "1", "of", "4", "ranks", "live"]
    memory = ["585.0", "KiB", "4.0", "KiB", "512", "B", "14.3", "MiB", "142.8", "MiB", "285.6", "MiB", "5.0", "GiB"]
    assert ["0", "live", *memory] in words
    assert ["1", "dead", *memory] in words
    assert [
        "0",
        "full",
        "degraded",
        "1000",
        "40",
        "12",
        "800",
        "10",
        "rank",
        "1:",
        "driver",
        "(map",
        "of",
        "c4_kv)",
    ] in words
    assert [
        "0",
        "c4_kv",
        "full",
        "146.2",
        "KiB",
        "4.0",
        "KiB",
        "512",
        "B",
        "none",
        "71.4",
        "MiB",
        "142.8",
        "MiB",
    ] in words
    assert "rank 1: rank 1: rank lost [link]" in lines
    assert "no snapshot of rank 2, 3: not started yet, or closed" in lines
    assert lines[-1].endswith("--sweep removes what they left.")


def test_json_has_everything_and_sums_live_ranks_only(engines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # R53, R79
    assert main(["status", "--json", "--state-dir", str(engines)]) == 0
    [engine] = json.loads(capsys.readouterr().out)["engines"]
    assert (engine["name"], engine["life"], engine["live_ranks"]) == ("demo", "partly dead", 1)
    assert engine["totals"]["mapped_bytes"] == 4 * PAGE
    assert engine["totals"]["limit_bytes"] == 100 * PAGE
    first, second = engine["ranks"]
    assert first["state"]["pools"] == state()["pools"]
    assert first["state"]["counters"]["misses"] == 3
    assert first["totals"]["virtual_bytes"] == 2000 * PAGE
    assert (second["life"], second["owner"]["start_ticks"]) == ("dead", 1)


def test_sweeping_removes_the_dead_only(engines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--sweep", "--state-dir", str(engines)]) == 0
    output = capsys.readouterr().out
    assert f"swept {file_path(str(engines), 'demo', 1)}" in output
    assert [path.name for path in engines.iterdir()] == ["kvcached_dist.demo.0"]
    assert main(["status", "--sweep", "--json", "--state-dir", str(engines)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["swept"], report["not_swept"]) == ([], [])


def test_the_directory_comes_from_the_environment(
    engines: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHED_DIST_STATE_DIR", str(engines))
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state_dir"] == str(engines)


def test_a_snapshot_that_makes_no_sense_is_shown_not_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nonsense = {"tp": "[red]", "pp": -1, "pools": {"p": 3, "q": {"mapped_bytes": None}}, "domains": [], "counters": 7,
                "device": None, "updated": "now", "failure": 5}  # fmt: skip
    plant(tmp_path, "odd", 0, DEAD, json.dumps(nonsense).encode())
    file_path(str(tmp_path), "odd", 1).write_text("garbage")
    assert main(["status", "--state-dir", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "TP=[red] PP=-1" in output
    assert "rank 1: not a snapshot file" in output


@pytest.mark.parametrize(
    ("arguments", "environ", "line"),
    [
        (["status", "--bad"], {}, "kvcached-dist: No such option: --bad; see 'kvcached-dist status --help'"),
        (["nope"], {}, "kvcached-dist: No such command 'nope'; see 'kvcached-dist --help'"),
        (
            ["status", "--state-dir", "/nope"],
            {},
            "kvcached-dist: --state-dir=/nope: must be an existing directory; for example --state-dir=/dev/shm",
        ),
        (
            ["status"],
            {"KVCACHED_GPU_UTILIZATION": "1.5"},
            "kvcached-dist: KVCACHED_GPU_UTILIZATION=1.5: must be a finite number above 0 and at most 1;"
            " for example KVCACHED_GPU_UTILIZATION=0.95",
        ),
        (
            ["status"],
            {"KVCACHED_DIST_STATE_DIR": "/nope"},
            "kvcached-dist: KVCACHED_DIST_STATE_DIR=/nope: cannot be used for snapshots (No such file or directory);"
            " for example KVCACHED_DIST_STATE_DIR=/dev/shm",
        ),
    ],
)
def test_a_mistake_is_answered_in_one_line_with_status_2(
    arguments: list[str],
    environ: dict[str, str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", line + "\n")


@pytest.mark.parametrize(
    ("raised", "code"),
    [(ConfigError("a\nb"), 2), (WaitTimeout("rank 1", "a b", 1), 1)],
)
def test_errors_of_commands_become_a_line_and_a_status(
    raised: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise raised

    monkeypatch.setattr("kvcached_dist.cli.status.list_engines", fail)
    assert main(["status"]) == code
    error = capsys.readouterr().err
    assert error.startswith("kvcached-dist: ")
    assert error.count("\n") == 1


def test_an_interrupted_command_says_so_by_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcached_dist.cli.status.list_engines", interrupt)
    assert main(["status"]) == 130


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kvcached_dist.cli.status.list_engines", fail)
    with pytest.raises(ZeroDivisionError):
        main(["status"])


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "status" in capsys.readouterr().out
    assert main([]) == 2


def test_a_command_whose_module_is_missing_does_not_disturb_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "COMMANDS", {"ghost": "Haunts.", "status": "Shows."})
    assert importlib.util.find_spec("kvcached_dist.cli.ghost") is None
    assert main(["ghost"]) == 2
    assert "No such command 'ghost'" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "ghost" not in capsys.readouterr().out


def test_sizes_for_people() -> None:
    assert [size(value) for value in (0, 1023, 1024, 3 << 29, 5 << 40, None, "x")] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 GiB", "5.0 TiB", "?", "?",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_command_as_a_process(engines: Path) -> None:
    command = [sys.executable, "-m", "kvcached_dist.cli", "status", "--state-dir", str(engines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo" in done.stdout
    reader = subprocess.run(
        f"{' '.join(command)} --json | head -c 10", shell=True, capture_output=True, text=True, timeout=30
    )
    assert (reader.stdout[0], reader.stderr) == ("{", "")

"""The growth benchmark beside kvcached: whatever that does, the benchmark gets figures or a reason."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import bounded, peer, peer_tp, plan

SCRIPT_OUTPUT = """Using layout contiguous=False
[worker 0] initialised - waiting for commands.
[iter 00] map=0.012000s  unmap=0.011000s
[iter 01] map=0.010000s  unmap=0.009000s
[iter 02] map=0.011000s  unmap=0.010000s

=== IPC Benchmark Summary ===
| Metric        |  Map (ms) | Unmap (ms) |
|---------------|-----------|------------|
| mean          |     11.00 |      10.00 |
| p95           |     11.90 |      10.90 |
| max           |     12.00 |      11.00 |
| min           |     10.00 |       9.00 |
| per-page mean |     11.00 |      10.00 |
"""

DRIVER = """
import os, sys
mapped = set()
def init_kvcached(device, page, contiguous): print("noise before the result")
def create_kv_tensors(size, dtype_size, device, layers, buffers=2, group_id=0):
    assert size % (2 * 2097152) == 0, size
def kv_tensors_created(group_id=0): return True
def map_to_kv_tensors(offsets, group_id=0):
    {on_map}
    mapped.update(offsets)
    return True
def unmap_from_kv_tensors(offsets, group_id=0):
    mapped.difference_update(offsets)
    return True
"""

BENCHMARK = """
import importlib.util, os, sys, time
from pathlib import Path
def init_kvcached(tp_rank=0, world_size=1): print(OUTPUT)
OUTPUT = Path(os.environ["PEER_OUTPUT"]).read_text()
if __name__ == "__main__":
    assert (Path(__file__).resolve().parent / "broadcast_map_impl").is_dir()
    init_kvcached(
        tp_rank=0, tp_size=2
    )
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a package with kvcached's names on the path: this one ``on_map``, this signature of ``init_kvcached``."""

    def make(on_map: str = "pass", known: str = "tp_rank=0, world_size=1") -> Path:
        folder = tmp_path / "kvcached"
        interface = folder / "integration" / "vllm" / "interfaces.py"
        interface.parent.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "vmm_ops.py").write_text(DRIVER.format(on_map=on_map))
        interface.write_text(f"def init_kvcached({known}):\n    pass\n")
        script = tmp_path / peer_tp.SCRIPT
        (script.parent / "broadcast_map_impl").mkdir(parents=True)
        script.write_text(BENCHMARK)
        (tmp_path / "output").write_text(SCRIPT_OUTPUT)
        monkeypatch.setenv("PEER_OUTPUT", str(tmp_path / "output"))
        monkeypatch.syspath_prepend(str(tmp_path))
        return script

    return make


SLEEPER = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); open(sys.argv[1], 'w').write(str(p.pid))"


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def ends(pid: int, seconds: float = 5) -> bool:
    """Whether a process that was killed is gone within a while."""
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


@pytest.mark.slow
def test_a_command_that_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    began = time.monotonic()
    ended = bounded.run([sys.executable, "-c", f"{SLEEPER}; p.wait()", str(child)], 1.5, os.environ)
    assert time.monotonic() - began < 20
    assert ended.timed_out
    assert ended.failure == "not done within 2 s"
    assert ends(int(child.read_text()))


def test_children_of_a_command_that_ended_are_ended_too(tmp_path: Path) -> None:
    child = tmp_path / "child"
    assert bounded.run([sys.executable, "-c", SLEEPER, str(child)], 20, os.environ).failure == ""
    assert ends(int(child.read_text()))


def test_a_failure_is_told_by_the_errors_of_all_processes() -> None:
    code = "import sys; print('Traceback\\nTypeError: no such name', file=sys.stderr); raise TimeoutError('no sockets')"
    ended = bounded.run([sys.executable, "-c", code], 20, os.environ)
    assert ended.failure == "ended with status 1: TypeError: no such name; TimeoutError: no sockets"


def test_without_kvcached_there_is_a_reason() -> None:
    assert peer.measure((43,), 1) == {"skipped": "kvcached is not importable"}
    assert peer.blocks() == {"skipped": "kvcached is not importable"}
    assert peer_tp.measure((43,), (2,), 2) == {"skipped": "kvcached is not importable"}


def test_a_package_without_its_extension_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvcached").mkdir()
    (tmp_path / "kvcached" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert peer.missing() == f"kvcached in {tmp_path / 'kvcached'} has no built extension vmm_ops"


@pytest.mark.slow
def test_both_layouts_have_figures_for_the_bytes_of_k_and_v(install: Any) -> None:
    install()
    rows = peer.measure((43,), 3, "cpu")["rows"]
    assert [(row["layout"], row["pages"], row["useful_bytes"] >> 20) for row in rows] == [
        ("per layer", 1, 172), ("per layer", 8, 1376), ("contiguous", 1, 172), ("contiguous", 8, 1376),
    ]  # fmt: skip
    assert all(row["map"]["n"] == 3 and row["unmap"]["n"] == 3 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_map", "said"),
    [
        ("os.abort()", "ended with SIGABRT"),
        ("return False", "RuntimeError: map returned False, unmap True"),
        ("raise MemoryError('card is full')", "MemoryError: card is full"),
    ],
)
def test_a_peer_that_fails_is_a_reason_in_every_row(install: Any, on_map: str, said: str) -> None:
    install(on_map)
    rows = peer.measure((43,), 1, "cpu")["rows"]
    assert len(rows) == 4
    assert all(said in row["skipped"] for row in rows)


def test_offsets_are_those_of_each_layout() -> None:
    page = peer.PAGE_BYTES
    assert peer.offsets_of(3, 43, False) == [0, page, 2 * page]
    assert peer.offsets_of(3, 43, True) == [0, 86 * page, 172 * page]


def test_the_benchmark_of_kvcached_is_found_adapted_run_and_read(install: Any) -> None:
    script = install()
    found = peer_tp.measure((43,), (1, 2), 2)
    assert found["script"] == str(script)
    assert "world_size" in found["adapted"]
    assert [(row["layout"], row["pages"]) for row in found["rows"]] == [
        ("per layer", 1), ("per layer", 8), ("contiguous", 1), ("contiguous", 8),
    ]  # fmt: skip
    first = found["rows"][0]
    assert first["map"]["raw_us"] == [12000.0, 10000.0, 11000.0]
    assert (first["map"]["p50_us"], first["unmap"]["p50_us"]) == (11000.0, 10000.0)
    assert first["printed"]["p95"] == {"map_ms": 11.9, "unmap_ms": 10.9}
    assert "--not-contiguous" in first["options"]
    assert "--not-contiguous" not in found["rows"][2]["options"]


def test_a_benchmark_that_fits_is_run_as_it_is(install: Any, tmp_path: Path) -> None:
    script = install(known="tp_rank=0, tp_size=1")
    assert peer_tp.adapted(script, tmp_path) == (script, "")
    rows = peer_tp.measure((43,), (2,), 2)["rows"]  # this one's own init_kvcached does not take the name
    assert all("TypeError" in row["skipped"] for row in rows)


@pytest.mark.slow
def test_a_benchmark_that_hangs_is_not_started_again_in_that_layout(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install()
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(peer_tp, "SECONDS", 0.5)
    rows = peer_tp.measure((43,), (2,), 2)["rows"]
    reasons = [row["skipped"] for row in rows]
    assert all("not done within" in reason for reason in reasons[::2])
    assert all("not run" in reason for reason in reasons[1::2])


def test_output_without_figures_is_a_reason() -> None:
    assert "no figures: nothing" in peer_tp.parsed(bounded.Ended("nothing", "", 1.0))["skipped"]
    failed = bounded.Ended(SCRIPT_OUTPUT, "ended with SIGKILL", 1.0)
    assert peer_tp.parsed(failed) == {"skipped": "ended with SIGKILL", "seconds": 1.0}


def test_one_card_is_a_reason(install: Any) -> None:
    install()
    assert "one card per rank" in peer_tp.measure((43,), (1, 2), 1)["skipped"]


def test_ours_is_the_run_of_the_same_bytes() -> None:
    run = plan.pages_of(43, peer.useful_bytes(43, 1))
    grow = {"p50_us": 5.0, "p99_us": 6.0, "raw_us": [5.0]}
    cell = {"layers": 43, "ranks": 2, "run_pages": run, "useful_bytes": 1, "ours": {"grow": grow, "reclaim": grow}}
    page = plan.cell_of(OPTIONS, 2, 43, 1).page_bytes
    assert abs(run * page - peer.useful_bytes(43, 1)) <= page / 2
    found = peer.beside_ours({"rows": [peer.row_of("per layer", 43, ranks, 1) for ranks in (1, 2)]}, [cell])
    assert "ours" not in found["rows"][0]
    assert found["rows"][1]["ours"]["grow"] == {"p50_us": 5.0, "p99_us": 6.0}


OPTIONS = plan.Options("host", (43,), (1, 16), 5, 64, 8 << 30, 1, "", True, False, {43: (181,)})


def test_run_lengths_beside_another_project_are_measured_for_that_model_only() -> None:
    assert OPTIONS.lengths(43) == (1, 16, 181)
    assert OPTIONS.lengths(61) == (1, 16)

"""Bad input: one line that names the value and what would work, exit status 2, nothing started."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcached_dist.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a refused command."""
    assert main(["replay", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--trace", "/nowhere.jsonl"), ("/nowhere.jsonl", "synthetic")),
        (("--model", "gpt-9"), ("gpt-9", "deepseek-v4-flash")),
        (("--capacity", "10M"), ("10485760", "the minimum per rank is")),
        (("--capacity", "lots"), ("--capacity=lots", "2GiB")),
        (("--capacity", "-5"), ("-5", "2GiB")),
        (("--fault", "boom"), ("boom", "rank=1,op=create,nth=37")),
        (("--fault", "rank=9,op=kill,at=map"), ("rank=9", "rank=3")),
        (("--fault", "rank=1,op=kill,at=lunch"), ("lunch", "reserved")),
        (("--tp", "0"), ("--tp 0", "--tp 2")),
        (("--pp", "-1"), ("--pp -1", "--pp 2")),
        (("--tp", "x"), ("--tp", "integer")),
        (("--tp", "65"), ("130 ranks", "at most 64")),
        (("--backend", "tpu"), ("tpu", "host, cuda")),
        (("--launcher", "mpi"), ("mpi", "spawn, torchrun")),
        (("--launcher", "torchrun"), ("MASTER_ADDR", "torchrun --nproc-per-node 4")),
        (("--speed", "0"), ("--speed 0", "--speed 10")),
        (("--speed", "nan"), ("--speed nan", "--speed 10")),
        (("--requests", "0"), ("--requests 0", "at least 1")),
        (("--granule", "5000"), ("--granule 5000", "power of two")),
        (("--lease", "0"), ("--lease 0", "above 0")),
        (("--cached-tokens", "-1"), ("--cached-tokens -1", "200000")),
        (("--seed", "-1"), ("--seed -1", "from 0")),
        (("--json", "/nowhere/report.json"), ("/nowhere/report.json", "does not exist")),
        (("--plot", "/nowhere/memory.png"), ("/nowhere/memory.png", "does not exist")),
        (("--bogus",), ("--bogus", "--help")),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    line = refused(capsys, *arguments)
    assert [text for text in says if text not in line] == []


def test_a_malformed_line_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 1}\n')
    assert f"{path}, line 2: input_length is missing; expected" in refused(capsys, "--trace", str(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [("KVCACHED_GPU_UTILIZATION", "7"), ("KVCACHED_DIST_LEASE_S", "soon"), ("KVCACHED_MIN_RESERVED_PAGES", "99")],
)
def test_a_bad_environment_value_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    line = refused(capsys)
    assert value in line
    assert "for example" in line


def test_cuda_without_a_driver_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcached_dist._native.cuda_available", lambda: (False, "no CUDA driver"))
    assert "--backend host" in refused(capsys, "--backend", "cuda")

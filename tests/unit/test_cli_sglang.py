"""``kvcached-dist sglang`` where there is no SGLang; where there is one, the engine lane tests it."""

from __future__ import annotations

import sys

import pytest

from kvcached_dist.cli import main


@pytest.mark.slow
def test_without_sglang_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ["sglang", *(name for name in sys.modules if name.startswith("sglang."))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["sglang"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvcached-dist: SGLang cannot be imported in this environment (")
    assert error.count("\n") == 1

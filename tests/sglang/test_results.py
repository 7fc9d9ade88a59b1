"""The complete run keeps its results, resumes after them, and says what it has not run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.sglang import full_results
from tests.sglang.full_results import Recorder, page, read, write

PASSED = {"outcome": "passed", "seconds": 54.0, "date": "2026-01-02 03:04", "commit": "abc", "machine": "2 cores"}
PASSED |= {"versions": "SGLang 1", "facts": {"grows": 7, "retractions": 2}}
FAILED = {**PASSED, "outcome": "failed"}


def config(path: Path, *, only: tuple[str, ...] = (), fresh: bool = False) -> pytest.Config:
    options = {"results": path, "only": list(only), "fresh": fresh}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    return cast(pytest.Config, SimpleNamespace(getoption=options.__getitem__, hook=hook))


def item(name: str, *, full: bool = True) -> pytest.Item:
    return cast(
        pytest.Item,
        SimpleNamespace(nodeid=f"tests/sglang/{name}", get_closest_marker=lambda marker: full and marker == "full"),
    )


def chosen(path: Path, **options: Any) -> list[str]:
    items = [item("a.py::one"), item("a.py::two"), item("b.py::three"), item("c.py::short", full=False)]
    made = config(path, **options)
    Recorder(made).pytest_collection_modifyitems(made, items)
    return [full_results.key(chosen_item.nodeid) for chosen_item in items]


def report(name: str, outcome: str, when: str = "call") -> Any:
    return SimpleNamespace(
        nodeid=f"tests/sglang/{name}", outcome=outcome, when=when, passed=outcome == "passed",
        failed=outcome == "failed", duration=1.25, longrepr="why", user_properties=[("grows", 3)],
    )  # fmt: skip


def test_what_has_passed_is_not_run_again_and_what_has_failed_is(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert chosen(path) == ["a.py::one", "a.py::two", "b.py::three"]
    write(path, {"a.py::one": PASSED, "a.py::two": FAILED})
    assert chosen(path) == ["a.py::two", "b.py::three"]
    assert chosen(path, fresh=True) == ["a.py::one", "a.py::two", "b.py::three"]
    assert chosen(path, only=("thr", "one")) == ["b.py::three"]


def test_every_result_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    recorder = Recorder(config(path))
    recorder.pytest_runtest_logreport(report("a.py::one", "passed", "setup"))
    assert not path.exists()
    recorder.pytest_runtest_logreport(report("a.py::one", "passed"))
    recorder.pytest_runtest_logreport(report("a.py::one", "passed", "teardown"))
    found = read(path)["a.py::one"]
    assert (found["outcome"], found["seconds"], found["facts"]) == ("passed", 1.2, {"grows": 3})
    recorder.pytest_runtest_logreport(report("a.py::two", "failed", "setup"))
    assert read(path)["a.py::two"]["error"] == "why"


def test_a_test_that_fails_while_it_cleans_up_has_failed(tmp_path: Path) -> None:
    recorder = Recorder(config(tmp_path / "results.json"))
    recorder.pytest_runtest_logreport(report("a.py::one", "passed"))
    recorder.pytest_runtest_logreport(report("a.py::one", "failed", "teardown"))
    assert recorder.results["a.py::one"]["outcome"] == "failed"


def test_the_page_says_what_was_not_run() -> None:
    text = page(
        {"test_full_matrix.py::test_llama[x]": PASSED},
        {"test_full_matrix.py::test_llama[x]", "test_full_soak.py::test_two"},
    )
    assert "1 of 1 passed, 1 not run" in text
    assert "| matrix: llama[x] | passed | 54.0 | 7 |  |  | retractions 2 | `abc` | 2026-01-02 03:04 |" in text
    assert "Not run:\n\n* soak: two\n" in text

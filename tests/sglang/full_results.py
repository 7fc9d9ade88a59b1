"""A pytest plugin that keeps one result per test of the complete run, resumes after it, and writes the page.

Loaded by ``./scripts/test_sglang --full``. A test that has passed according to the file of results is not run again;
the file is written after every test, so that a run can be interrupted at any time.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks" / "data" / "sglang_full.json"
PAGE = ROOT / "docs" / "benchmarks" / "sglang_full.md"
COMMAND = "./scripts/test_sglang --full"

Results = dict[str, dict[str, Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("complete run")
    group.addoption("--only", action="append", default=[], metavar="WORD", help="tests whose name has one of these")
    group.addoption("--fresh", action="store_true", help="run what has passed before again")
    group.addoption("--results", type=Path, default=RESULTS, help="file of results")


def key(nodeid: str) -> str:
    """What a test is called in the results: without the folder."""
    return nodeid.rpartition("/")[2]


def read(path: Path) -> Results:
    """Earlier results; none when the file is not there."""
    return dict(json.loads(path.read_text())["tests"]) if path.exists() else {}


def write(path: Path, results: Results) -> None:
    """All results, replaced in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps({"command": COMMAND, "tests": dict(sorted(results.items()))}, indent=1) + "\n")
    os.replace(aside, path)


def about() -> dict[str, str]:
    """When, from which commit of the product, and where."""
    from importlib.metadata import version

    changed = _git("status", "--porcelain", "--", "kvcached_dist", "coord", "native")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": (_git("rev-parse", "--short", "HEAD") or "unknown") + ("-changed" if changed else ""),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no card",
        "versions": f"SGLang {version('sglang')}, torch {version('torch')}, Python {platform.python_version()}",
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


class Recorder:
    """Chooses what is run and keeps what came of it.

    Args:
        config: of this run.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.path: Path = config.getoption("results")
        self.only: list[str] = config.getoption("only")
        self.fresh: bool = config.getoption("fresh")
        self.results = read(self.path)
        self.present: set[str] = set()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wanted = [item for item in items if item.get_closest_marker("full")]
        self.present = {key(item.nodeid) for item in wanted}
        if self.only:
            wanted = [item for item in wanted if any(word in item.nodeid for word in self.only)]
        if not self.fresh:
            passed = {name for name, result in self.results.items() if result["outcome"] == "passed"}
            wanted = [item for item in wanted if key(item.nodeid) not in passed]
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One result per test: what the call came to, or the first phase that failed around it."""
        name = key(report.nodeid)
        if report.when != "call" and report.passed:
            return
        if report.when == "teardown" and self.results.get(name, {}).get("outcome") == "failed":
            return
        self.results[name] = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            **about(),
            "facts": dict(report.user_properties),
            **({"error": str(report.longrepr)[-2000:]} if report.failed else {}),
        }
        write(self.path, self.results)

    def pytest_sessionfinish(self) -> None:
        if self.path == RESULTS and self.results:
            PAGE.write_text(page(self.results, self.present))


def page(results: Results, present: set[str]) -> str:
    """The results as a page.

    Args:
        results: by test.
        present: tests that there are; those without a result were not run.
    """
    passed = sum(result["outcome"] == "passed" for result in results.values())
    not_run = sorted(present - set(results))
    seconds = sum(result["seconds"] for result in results.values())
    lines = [
        "# The complete run against SGLang",
        "",
        f"`{COMMAND}` wrote this page and [its data](data/sglang_full.json): {passed} of {len(results)} passed,"
        f" {len(not_run)} not run, {seconds / 60:.0f} minutes in all. Llama and DeepSeek-V4 rows serve natively first,"
        " then with elastic pools on the host backend; tokens must be equal, memory must have grown and come back,"
        " and the injected refusals must have been met.",
        "",
        "| test | result | seconds | grows | refused | reclaimed runs | other facts | commit | date (UTC) |",
        "|---|---|--:|--:|--:|--:|---|---|---|",
    ]
    lines += [_row(name, result) for name, result in sorted(results.items())]
    if not_run:
        lines += ["", "Not run:", "", *(f"* {_short(name)}" for name in not_run)]
    where = sorted({f"{result['machine']}; {result['versions']}" for result in results.values()})
    return "\n".join([*lines, "", "Machine: " + " / ".join(where) + ".", ""])


def _short(name: str) -> str:
    return name.removeprefix("test_full_").replace(".py::test_", ": ")


def _row(name: str, result: Mapping[str, Any]) -> str:
    facts = dict(result["facts"])
    counted = [str(facts.pop(name, "")) for name in ("grows", "refused", "reclaimed_runs")]
    others = "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())
    cells = [
        _short(name),
        result["outcome"],
        str(result["seconds"]),
        *counted,
        others,
        f"`{result['commit']}`",
        result["date"],
    ]
    return f"| {' | '.join(cells)} |"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config), "complete-run")

"""What holds for every test: its lane, its limits, and that it leaves nothing behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import guards
from tests.lanes import LANES, lane_of

SLOW_SECONDS = 0.25
"""A test that takes longer is marked ``slow``."""

SETTING_PREFIXES = ("KVCACHED_", "ENABLE_KVCACHED")

# Tests choose their settings themselves, so that the shell they are started from does not matter.
for _name in [name for name in os.environ if name.startswith(SETTING_PREFIXES)]:
    del os.environ[_name]

# Many processes on few cores: more than one thread each only makes them wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None)
hypothesis.settings.load_profile("deterministic")

_state_directory = pytest.StashKey[Path]()
_unmarked_slow: list[tuple[float, str]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lane",
        action="append",
        choices=[lane.name for lane in LANES],
        help="run only the tests of this lane (may be repeated)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"slow: takes longer than {SLOW_SECONDS} s (deselect with -m 'not slow')")
    for lane in LANES:
        config.addinivalue_line("markers", f"{lane.name}: lane, set by the folder; needs {lane.needs}")
    guards.adopt_orphans()
    guards.forbid_network()
    config.stash[_state_directory] = guards.private_state_directory()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_state_directory], ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Keeps away from the files of lanes that are not run, which may import what is not installed.

    The engine lane has an environment of its own and is looked at only when it is asked for by name.
    """
    lane = lane_of(collection_path)
    wanted = config.getoption("--lane")
    if lane is None or lane.name in (wanted or [lane.name for lane in LANES if lane.name != "sglang"]):
        return None
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        lane = lane_of(item.path)
        if lane is None:
            folders = ", ".join(folder for lane in LANES for folder in lane.folders)
            raise pytest.UsageError(f"{item.path} is in no lane: put it into a folder of tests/lanes.py ({folders})")
        item.add_marker(lane.name)
        if lane.name == "gpu" and (reason := _no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu() -> str | None:
    from kvcached_dist import _native

    usable, reason = _native.cuda_available()
    return None if usable else reason


@pytest.fixture(autouse=True)
def nothing_left_behind(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fails a test after which a process or a shared-memory file is there that was not there before.

    What fixtures of a wider scope hold exists before and is theirs.
    """
    folder = pytestconfig.stash[_state_directory]
    processes, files = guards.child_processes(), set(folder.iterdir())
    yield
    left = guards.left_over_processes(processes) + guards.left_over_files(folder, files)
    if left:
        pytest.fail("the test left behind:\n" + "\n".join(left), pytrace=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.duration > SLOW_SECONDS and "slow" not in report.keywords:
        _unmarked_slow.append((report.duration, report.nodeid))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _unmarked_slow:
        terminalreporter.section(f"slower than {SLOW_SECONDS} s without the marker 'slow'")
        for seconds, nodeid in sorted(_unmarked_slow, reverse=True):
            terminalreporter.line(f"{seconds:.2f} s  {nodeid}")

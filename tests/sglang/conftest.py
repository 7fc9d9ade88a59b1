"""The engine in this process: stand-ins for what a machine without a card lacks, and its settings published once."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

STANDINS = Path(__file__).parent / "standins"

ENGINE_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    "SGLANG_DSV4_FP4_EXPERTS": "0",
}

os.environ.update(ENGINE_ENVIRONMENT)
sys.path.insert(0, str(STANDINS))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: takes minutes, run by ./scripts/test_sglang --full and not in the lane")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure comes with what the servers of its module printed last: their folders are gone afterwards."""
    from tests.sglang.server import running

    report = yield
    if report.failed:
        report.sections += [(f"end of {server.log}", server.tail(120)) for server in running()]
    return report


@pytest.fixture(scope="session")
def engine_settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The engine's resolved settings, as a scheduler process has them."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    from tests.sglang.models import write_llama

    folder = write_llama(tmp_path_factory.mktemp("model"), weights=False)
    settings = ServerArgs(model_path=str(folder), device="cpu", load_format="dummy", page_size=256)
    runtime_context.publish(settings, role="scheduler")
    return settings


@pytest.fixture
def registry() -> Iterator[Any]:
    """The engine's hook registry; what a test applied is undone."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    with undone(HookRegistry):
        yield HookRegistry


@contextlib.contextmanager
def undone(registry: Any) -> Iterator[None]:
    """What is applied to the engine inside is undone afterwards."""
    from kvcached_dist.config import Config
    from kvcached_dist.sglang.plugin import Plugin

    before = {hook.target: _resolved(hook.target) for hook in Plugin(Config.preset("tests")).hooks}
    try:
        yield
    finally:
        registry.reset()
        for target, original in before.items():
            owner, _, name = target.rpartition(".")
            setattr(_resolved(owner), name, original)


def _resolved(target: str) -> Any:
    import pkgutil

    return pkgutil.resolve_name(target)

"""Whether the hooks are where they should be, and what happens when they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_dist.config import Config
from kvcached_dist.coord.core.errors import ConfigError
from kvcached_dist.sglang import plugin as plugin_module
from kvcached_dist.sglang.plugin import Hook, Plugin
from kvcached_dist.sglang.runtime import Phase
from tests.sglang.conftest import STANDINS


def test_the_engine_has_every_place_that_is_hooked(engine_settings: Any) -> None:
    assert Plugin(Config.preset("tests")).missing() == []


def test_a_hook_is_in_force_only_after_the_registry_has_applied_it(engine_settings: Any, registry: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookType

    plugin = Plugin(Config.preset("tests"))
    assert len(plugin.not_in_force()) == len(plugin.hooks)
    plugin.register(registry, HookType)
    registry.apply_hooks()
    assert plugin.not_in_force() == []


def test_a_hook_that_another_plugin_replaced_is_not_in_force(engine_settings: Any, registry: Any) -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.plugins.hook_registry import HookType

    plugin = Plugin(Config.preset("tests"))
    plugin.register(registry, HookType)
    registry.apply_hooks()
    PrefillAdder.add_chunked_req = lambda self, req: req
    assert plugin.not_in_force() == ["sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req"]


def test_a_missing_place_keeps_the_native_pools(
    engine_settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    _add_hook(monkeypatch, Hook("sglang.srt.managers.scheduler.Scheduler.no_such_thing", "AFTER", print))
    plugin_module.register()
    assert "this version of SGLang has no sglang.srt.managers.scheduler.Scheduler.no_such_thing" in caplog.text
    assert not HookRegistry._hooks


def test_a_missing_place_ends_the_start_where_elastic_pools_are_required(
    engine_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHED_REQUIRE", "1")
    _add_hook(monkeypatch, Hook("sglang.srt.no_such_module.thing", "AFTER", print))
    with pytest.raises(SystemExit, match="no_such_module"):
        plugin_module.register()


def test_a_bad_setting_ends_the_start(engine_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHED_DIST_LEASE_S", "soon")
    with pytest.raises(SystemExit, match="KVCACHED_DIST_LEASE_S=soon"):
        plugin_module.register()


def test_automatic_patching_switched_off_registers_nothing(
    engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVCACHED_AUTOPATCH", "0")
    plugin_module.register()
    assert "event=plugin elastic=no why='KVCACHED_AUTOPATCH is off'" in caplog.text
    assert not registry._hooks
    monkeypatch.setenv("KVCACHED_AUTOPATCH", "1")
    plugin_module.register()
    assert set(registry._hooks) == {hook.target for hook in Plugin(Config.preset("tests")).hooks}


def load_as_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own way of running plugins, which logs and swallows their exceptions."""
    from sglang.srt import plugins

    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setenv("SGLANG_PLUGINS", "kvcached_dist")
    plugins.load_plugins()


@pytest.mark.parametrize("broken", ["kvcached_dist.sglang.plugin", "kvcached_dist.config"])
def test_a_library_that_cannot_be_imported_ends_the_start_where_elastic_pools_are_required(
    broken: str, engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_KVCACHED", "1")
    monkeypatch.setenv("KVCACHED_REQUIRE", "1")
    _break_import(monkeypatch, broken)
    with pytest.raises(SystemExit, match=f"KVCACHED_REQUIRE=1, but the pools would stay native: .*{broken}"):
        load_as_the_engine_does(monkeypatch)


@pytest.mark.parametrize(("enabled", "lines"), [("1", 1), ("0", 0)])
def test_a_library_that_cannot_be_imported_keeps_the_native_pools_and_says_so(
    enabled: str, lines: int, engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("ENABLE_KVCACHED", enabled)
    _break_import(monkeypatch, "kvcached_dist.config")
    load_as_the_engine_does(monkeypatch)
    assert caplog.text.count("event=plugin elastic=no why='ModuleNotFoundError: ") == lines
    assert "Failed to execute general plugin" not in caplog.text
    assert not registry._hooks


def _break_import(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    parent, _, name = module.rpartition(".")
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr(f"{parent}.{name}", raising=False)


class Tree:
    """A prefix cache of the engine that counts its tokens per component only."""

    def evictable_size(self) -> int:
        raise NotImplementedError


def test_a_prefix_cache_that_does_not_say_what_it_could_evict_ends_the_start() -> None:
    plugin = Plugin(Config.preset("tests"))
    plugin._scheduler_made(None, SimpleNamespace(tree_cache=Tree()))
    plugin.runtime.phase = Phase.SERVING
    with pytest.raises(ConfigError, match=r"prefix cache is a Tree.*NotImplementedError"):
        plugin._scheduler_made(None, SimpleNamespace(tree_cache=Tree()))
    plugin._scheduler_made(None, SimpleNamespace(tree_cache=SimpleNamespace(evictable_size=lambda: 0)))


def test_what_stays_native_says_why_or_ends_the_start(caplog: pytest.LogCaptureFixture) -> None:
    lenient = Plugin(Config.preset("tests")).starting
    lenient.stay_native("rank 1: MLA")
    assert lenient.runtime.phase is Phase.NATIVE
    assert "event=pool rank=0 name=all elastic=no why='rank 1: MLA'" in caplog.text
    with pytest.raises(ConfigError, match="KVCACHED_REQUIRE=1, but the pools would stay native: rank 1: MLA"):
        Plugin(Config.preset("tests", require=True)).starting.stay_native("rank 1: MLA")


@pytest.mark.slow
@pytest.mark.parametrize("switch", [None, "", "0", "false"])
def test_switched_off_nothing_is_registered_or_even_imported(switch: str | None) -> None:
    script = (
        "import sys, kvcached_dist.sglang as entry; entry.register();"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'sglang')"
        " or m in ('kvcached_dist.sglang.plugin', 'kvcached_dist._native')))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ENABLE_KVCACHED"}
    environment["PYTHONPATH"] = str(STANDINS)
    if switch is not None:
        environment["ENABLE_KVCACHED"] = switch
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_entry_point_is_installed() -> None:
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="sglang.srt.plugins", name="kvcached_dist")
    assert entry.value == "kvcached_dist.sglang:register"


def _add_hook(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    original = Plugin.__init__

    def with_one_more(self: Plugin, config: Config) -> None:
        original(self, config)
        self.hooks = (*self.hooks, hook)

    monkeypatch.setattr(Plugin, "__init__", with_one_more)

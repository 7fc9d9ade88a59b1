"""Versions of the engine are told apart by what they have; what is missing is named before anything is registered."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcached_dist.cli import main
from kvcached_dist.cli.sglang import check
from kvcached_dist.config import Config
from kvcached_dist.sglang import engine, features
from kvcached_dist.sglang.admission import Admission
from kvcached_dist.sglang.features import Use
from kvcached_dist.sglang.plugin import Plugin

pytestmark = pytest.mark.slow

ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"


def test_the_engine_has_everything_that_the_hooks_use(engine_settings: Any) -> None:
    assert features.missing() == []


@pytest.mark.parametrize(
    "use",
    [
        Use("sglang.srt.managers.schedule_policy", "AddReqResult"),  # an attribute of a module
        Use(ADDER, "ceil_paged_tokens"),  # a method
        Use(ADDER, "cur_rem_token_offset"),  # set in __init__
        Use(f"{ADDER}.add_one_req", "has_chunked_req"),  # a parameter
        Use("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator", "layer_info"),  # a field
    ],
)
def test_names_are_found_wherever_they_are(engine_settings: Any, use: Use) -> None:
    assert features.has(use)


@pytest.mark.parametrize(
    "use",
    [Use(ADDER, "no_such_budget"), Use(f"{ADDER}.no_such_function", "req"), Use("sglang.srt.no_such_module", "x")],
)
def test_what_is_not_there_keeps_the_native_pools_and_is_named(
    engine_settings: Any, monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    monkeypatch.setattr(features, "USES", (*features.USES, use))
    assert Plugin(Config.preset("tests")).missing() == [str(use)]


def test_a_name_may_have_moved(engine_settings: Any) -> None:
    assert features.has(Use(ADDER, "no_such_budget", (ADDER, "rem_total_token_offset")))
    assert not features.has(Use(ADDER, "no_such_budget", ("sglang.srt.no_such_module", "x")))


def test_what_has_moved_is_read_where_it_is() -> None:
    kept, moved = SimpleNamespace(prefix_indices=[4, 5]), SimpleNamespace(prefix_len=3, prefix_indices=None)
    assert (engine.prefix_tokens(kept), engine.prefix_tokens(moved)) == (2, 3)
    assert engine.parallel_of(SimpleNamespace(ps="sizes and ranks")) == "sizes and ranks"


def test_sizes_and_ranks_may_be_kept_for_the_process(engine_settings: Any) -> None:
    assert engine.parallel_of(SimpleNamespace()) is engine.context("parallel")


def test_growth_counts_in_a_budget_of_its_own() -> None:
    runtime = cast(Any, SimpleNamespace(elastic=True, growable_tokens=lambda: 40, published_free_tokens=lambda: 0))
    adder = SimpleNamespace(memory_budget=SimpleNamespace(total_offset=7, current_offset=0))
    Admission(runtime).opened(None, adder)
    assert vars(adder) == {"memory_budget": SimpleNamespace(total_offset=-33, current_offset=0)}


def test_names_are_found_behind_a_hook(engine_settings: Any, registry: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookType

    plugin = Plugin(Config.preset("tests"))
    plugin.register(registry, HookType)
    registry.apply_hooks()
    assert plugin.missing() == []


def test_the_command_says_that_this_version_fits(
    engine_settings: Any, registry: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sglang", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"]
    assert {place["in_force"] for place in said["places"]} == {True, None}


def test_the_command_names_what_is_missing(
    engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(features, "USES", (Use(ADDER, "no_such_budget"),))
    assert [place.name for place in check() if not place.present] == [f"{ADDER}: no_such_budget"]
    assert main(["sglang"]) == 1
    assert "Pools stay native" in capsys.readouterr().out

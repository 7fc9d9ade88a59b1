"""What is said of a draft model before its pool exists: what it creates is that, or its pool stays with the engine."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.coord.core.errors import ConfigError
from kvcached_dist.sglang.drafts import Draft
from kvcached_dist.sglang.runtime import Phase
from tests.sglang.drafted import LATENT, TOKENS, Engine, Served, buffers, kept_bytes, models, page, speculating

__all__ = ["models", "page", "speculating"]

pytestmark = pytest.mark.slow

LATENT_DIMS = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]


@pytest.fixture
def parallel() -> Iterator[None]:
    """The engine's own idea of its sizes: two ranks share the heads."""
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_tp_size=2):
        yield


def another_type(made: Engine) -> None:
    made.draft.kv_cache_dtype = torch.float32


def smaller_v_heads(made: Engine) -> None:
    made.draft.model_config.v_head_dim = 8


def two_ranks(made: Engine) -> None:
    for runner in (made.target, made.draft):
        runner.ps.attn_tp_size = 2


@pytest.mark.parametrize("page", [16], indirect=True)
@pytest.mark.parametrize(
    ("models", "change", "described"),
    [
        ("heads", another_type, Draft(3, 4, (24, 24), torch.float32)),
        ("latent", another_type, Draft(1, 0, (LATENT_DIMS, 0), torch.float32)),
        ("heads", smaller_v_heads, Draft(3, 4, (24, 8), torch.bfloat16)),
        ("heads", two_ranks, Draft(3, 2, (24, 24), torch.bfloat16)),
    ],
    indirect=["models"],
)
def test_what_its_own_model_says_is_what_is_made(
    change: Any, described: Draft, speculating: None, tmp_path: Path, page: int, models: Any, registry: Any,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if change is two_ranks:
        request.getfixturevalue("parallel")
    made = Engine(tmp_path, page, models)
    change(made)
    served = Served(made, registry, require=True).start()
    try:
        assert served.plugin.starting.draft == described
        assert served.snapshot("runtime_pools") == {}
        assert {buffer.dtype for buffer in buffers(served.draft.token_to_kv_pool)} == {described.dtype}
    finally:
        served.close()


OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "other heads": ({"head_num": 2}, "pool draft_kv: the engine makes 3 layers of (2, 24)"),
    "another type": ({"dtype": torch.float32}, "pool draft_kv: the engine makes 3 layers of (4, 24) float32"),
    "more layers": ({"layer_num": 4}, "pool draft_kv: the engine makes 4 layers"),
    "more tokens": ({"size": 2 * TOKENS}, "pool 'draft_kv': a view of shape (2064, 4, 24)"),
    "another class": ({}, "the engine built a Another"),
}


@pytest.mark.parametrize("page", [16], indirect=True)
@pytest.mark.parametrize("models", ["heads"], indirect=True)
@pytest.mark.parametrize("change", list(OTHERWISE))
@pytest.mark.parametrize("require", [False, True])
def test_a_draft_pool_that_was_not_described_stays_native_or_ends_the_start(
    change: str, require: bool, speculating: None, tmp_path: Path, page: int, models: Any, registry: Any,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from sglang.srt.mem_cache import kv_cache_configurator

    made, pool_class = Engine(tmp_path, page, models), kv_cache_configurator.MHATokenToKVPool
    changes, why = OTHERWISE[change]
    draft_class = pool_class if changes else type("Another", (pool_class,), {"__module__": pool_class.__module__})

    def other_for_the_draft(size: int, **options: Any) -> Any:
        if options["layer_num"] != 3:
            return pool_class(size, **options)
        chosen = {"size": size, **options, **changes}
        return draft_class(chosen.pop("size"), **chosen)

    monkeypatch.setattr(kv_cache_configurator, "MHATokenToKVPool", other_for_the_draft)
    served = Served(made, registry, require=require)
    try:
        if require:
            with pytest.raises(ConfigError, match=re.escape(f"the draft pool would stay native: {why}")):
                served.start()
            return
        served.start()
        assert served.runtime.phase is Phase.BOUND
        assert served.snapshot("runtime_pools") == kept_bytes(served)
        (line,) = [text for record in caplog.records if "name=draft" in (text := record.getMessage())]
        assert why in line.replace("\\'", "'")
        assert line.startswith("event=pool rank=0 name=draft elastic=no ")
        assert "layers of it that are used: 0 of 3" in line
        served.draft.token_to_kv_pool.k_buffer[0][served.extend(600)] = 1
    finally:
        served.close()


@pytest.mark.parametrize("page", [16], indirect=True)
@pytest.mark.parametrize(
    ("models", "name"), [("heads", "MHATokenToKVPool"), ("latent", "MLATokenToKVPool")], indirect=["models"]
)
def test_a_draft_pool_with_a_memory_pool_of_its_own_stays_native(
    name: str, speculating: None, tmp_path: Path, page: int, models: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache import kv_cache_configurator

    pool_class = getattr(kv_cache_configurator, name)
    own = {"__module__": pool_class.__module__, "enable_custom_mem_pool": property(lambda _: True, lambda *_: None)}
    of_target_and_draft = iter((pool_class, type(name, (pool_class,), own)))
    monkeypatch.setattr(kv_cache_configurator, name, lambda *args, **kw: next(of_target_and_draft)(*args, **kw))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _pool: nullcontext())
    served = Served(Engine(tmp_path, page, models), registry).start()
    try:
        assert served.runtime.phase is Phase.BOUND
        kept = sum(buffer.nbytes for buffer in buffers(served.draft.token_to_kv_pool))
        assert sum(served.snapshot("runtime_pools").values()) == kept
    finally:
        served.close()


@pytest.mark.parametrize("page", [16], indirect=True)
@pytest.mark.parametrize("models", ["heads"], indirect=True)
def test_a_second_pool_of_the_draft_model_has_memory_of_its_own(
    speculating: None, tmp_path: Path, page: int, models: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache import kv_cache_configurator

    made, pool_class, before = Engine(tmp_path, page, models), kv_cache_configurator.MHATokenToKVPool, []

    def two_for_the_draft(size: int, **options: Any) -> Any:
        if options["layer_num"] == 3:
            before.append(pool_class(size, **options))
        return pool_class(size, **options)

    monkeypatch.setattr(kv_cache_configurator, "MHATokenToKVPool", two_for_the_draft)
    served = Served(made, registry).start()
    try:
        assert served.snapshot("runtime_pools") == kept_bytes(served)
        before[0].k_buffer[0][served.extend(64)] = 1
        assert not served.draft.token_to_kv_pool.k_buffer[0].any()
    finally:
        served.close()


def two(made: Engine) -> None:
    made.scheduler.draft_worker._draft_model_runners = lambda: (made.draft, made.draft)


def none(made: Engine) -> None:
    made.scheduler.draft_worker = None


def moved(made: Engine) -> None:
    made.scheduler.draft_worker = SimpleNamespace()


def windows(made: Engine) -> None:
    model = copy.copy(made.draft.model_config)
    model.full_attention_layer_ids = [1]
    described = SimpleNamespace(**{**vars(made.draft), "is_hybrid_swa": True, "model_config": model})
    made.scheduler.draft_worker._draft_model_runners = lambda: (described,)


@pytest.mark.parametrize("page", [16], indirect=True)
@pytest.mark.parametrize("models", ["heads"], indirect=True)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (none, "there are 0 draft models in this process"),
        (two, "there are 2 draft models in this process"),
        (moved, "laid out differently"),
        (windows, "not supported in a draft model: sliding windows"),
    ],
)
def test_what_cannot_be_described_stays_native_beside_an_elastic_target(
    change: Any, why: str, speculating: None, tmp_path: Path, page: int, models: Any, registry: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    made = Engine(tmp_path, page, models)
    change(made)
    served = Served(made, registry, require=True)
    try:
        served.start()
        assert (served.runtime.phase, list(served.mapped())) == (Phase.BOUND, ["mha_kv"])
        assert served.snapshot("runtime_pools") == kept_bytes(served)
        (line,) = [record.getMessage() for record in caplog.records if "name=draft" in record.getMessage()]
        assert line.startswith("event=pool rank=0 name=draft elastic=no ")
        assert why in line
    finally:
        served.close()

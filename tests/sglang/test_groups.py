"""DP attention: each data-parallel rank has its own queue, ids and coordinator; the others' marks never reach it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_dist import World
from kvcached_dist.sglang import engine
from kvcached_dist.sglang.engine import Group
from kvcached_dist.sglang.runtime import Mark
from tests.sglang.test_agreement import configurator


def parallel(rank: int, *, tp: int, dp: int, pp: int) -> Any:
    """The engine's ranks and sizes, as it numbers them."""
    tp_rank, attn_tp = rank % tp, tp // dp
    return SimpleNamespace(
        tp_rank=tp_rank, tp_size=tp, pp_rank=rank // tp, pp_size=pp, attn_dp_size=dp, attn_dp_rank=tp_rank // attn_tp,
        attn_tp_size=attn_tp, attn_tp_rank=tp_rank % attn_tp,
    )  # fmt: skip


def test_without_dp_attention_all_ranks_are_one_group() -> None:
    groups = [engine.group_of(parallel(rank, tp=2, dp=1, pp=2)) for rank in range(4)]
    assert [group.world for group in groups] == [World(rank, 2, 2) for rank in range(4)]
    assert {(group.first, group.name("served")) for group in groups} == {(0, "served")}


def test_with_dp_attention_every_data_parallel_rank_is_a_group_of_its_own() -> None:
    groups = [engine.group_of(parallel(rank, tp=4, dp=2, pp=2)) for rank in range(8)]
    assert [(group.dp_rank, group.world.rank) for group in groups] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3),
    ]  # fmt: skip
    assert {group.world.size for group in groups} == {4}
    assert {(group.dp_rank, group.first, group.name("served")) for group in groups} == {
        (0, 0, "served-dp0"), (1, 2, "served-dp1"),
    }  # fmt: skip
    assert groups[0].name("") == "", "the library makes unique names by itself"


def test_every_group_has_a_store_and_a_session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = [None] * 4
    meet, mine = threading.Barrier(4), threading.local()

    def gather(value: object, *_: object) -> list[Any]:
        said[mine.rank] = value
        meet.wait(10)
        return list(said)

    monkeypatch.setattr(engine, "gather", gather)

    def open_store(rank: int) -> tuple[Any, str]:
        mine.rank = rank
        return engine.open_store("127.0.0.1", engine.group_of(parallel(rank, tp=4, dp=2, pp=1)), 10.0)

    with ThreadPoolExecutor(4) as pool:
        (first, one), (second, two), (third, three), (_, four) = pool.map(open_store, range(4))
    assert one == two != three == four
    first.set("who", "group 0")
    third.set("who", "group 1")
    assert second.get("who") == b"group 0"


def test_a_group_of_one_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "gather", lambda value, *_: [value])
    store, session = engine.open_store("127.0.0.1", Group(0, 1, 0, 1, 0, 1), 10.0)
    assert store is None
    assert session


def test_on_a_later_stage_marks_stay_with_the_work_of_their_group(engine_settings: Any, registry: Any) -> None:
    """The engine takes an object that it does not know for a control request, which only one group may send."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
    from sglang.srt.plugins.hook_registry import HookType

    from kvcached_dist.config import Config
    from kvcached_dist.sglang.plugin import Plugin

    receiver = object.__new__(SchedulerRequestReceiver)
    mark, flush = Mark((b"frame",)), FlushCacheReqInput()
    assert receiver._split_work_and_control_reqs([flush, mark]) == ([], [flush, mark])
    Plugin(Config.preset("tests")).register(registry, HookType)
    registry.apply_hooks()
    assert receiver._split_work_and_control_reqs([flush, mark]) == ([mark], [flush])
    assert receiver._split_work_and_control_reqs([flush]) == ([], [flush])


def with_dp_attention(*, pp: int = 1, **changes: Any) -> Any:
    """What the engine is about to size, with two groups."""
    placed = parallel(0, tp=4, dp=2, pp=pp)
    vars(placed).update(dp_size=2, attn_cp_size=1, attn_dcp_size=1)
    return configurator(ps=placed, **changes)


@pytest.mark.parametrize("latent", [False, True])
def test_dp_attention_of_heads_and_of_latents_is_elastic(latent: bool, engine_settings: Any) -> None:
    assert engine.refusal(with_dp_attention(use_mla_backend=latent), dsv4_bridge=True) is None


def test_dp_attention_of_deepseek_v4_stays_native(engine_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "is_dsv4", lambda _configurator: True)
    said = engine.refusal(with_dp_attention(), dsv4_bridge=True)
    assert said == "not supported: DP attention of DeepSeek-V4"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pp": 2}, "with pipeline stages"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "with speculative decoding"),
        ({"is_hybrid_swa": True}, "with sliding-window layers"),
    ],
)
def test_dp_attention_that_was_never_served_stays_native(
    change: dict[str, Any], why: str, engine_settings: Any
) -> None:
    made = with_dp_attention(**change)
    if made.is_hybrid_swa:
        made.model_config.full_attention_layer_ids = [0]
    assert f"DP attention {why}" in (engine.refusal(made, dsv4_bridge=True) or "")


def test_dp_attention_with_a_control_channel_for_each_group_stays_native(
    engine_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, local = engine.context, SimpleNamespace(enable_dp_attention_local_control_broadcast=True)
    monkeypatch.setattr(engine, "context", lambda name: local if name == "parallel" else settings(name))
    said = engine.refusal(with_dp_attention(), dsv4_bridge=True) or ""
    assert "control requests broadcast in each group" in said

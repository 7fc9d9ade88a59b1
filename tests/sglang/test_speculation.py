"""Speculative decoding: which kinds, and the draft tokens that are allocated ahead of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_dist.sglang import engine
from tests.sglang.test_agreement import configurator


@pytest.fixture(params=["STANDALONE", "EAGLE", "EAGLE3"])
def chain(request: Any, engine_settings: Any) -> Any:
    """The engine's own settings of drafts in a chain of three."""
    from sglang.srt.runtime_context import get_spec

    with get_spec().override(
        speculative_algorithm=request.param, speculative_num_steps=3, speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
    ):  # fmt: skip
        yield


def speculating(**changes: Any) -> Any:
    return configurator(spec_algorithm=SimpleNamespace(is_none=lambda: False), **changes)


@pytest.mark.parametrize("page", [1, 16, 64])
def test_what_a_decode_step_allocates_is_covered(page: int, chain: None) -> None:
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, page_aligned_decode_alloc_lens

    reserve, most = get_alloc_reserve_per_decode(), 0
    for committed in range(1, 3 * page + 20):
        # From a request that was just prefilled to one whose drafts of the last step were all accepted.
        for ahead in range(reserve + 1):
            kv = SimpleNamespace(kv_committed_len=committed, kv_allocated_len=-(-(committed + ahead) // page) * page)
            _, _, needed = page_aligned_decode_alloc_lens([SimpleNamespace(kv=kv)], reserve=reserve, page_size=page)
            assert needed % page == 0
            most = max(most, needed // page)
    assert most <= engine.pages_per_decode(page) <= most + 1


def test_without_drafts_it_is_a_page(engine_settings: Any) -> None:
    assert [engine.pages_per_decode(page) for page in (1, 16)] == [1, 1]


def test_drafts_in_a_chain_leave_ordinary_pools_elastic(chain: None) -> None:
    assert engine.refusal(speculating(), dsv4_bridge=True) is None


def test_other_kinds_stay_native(engine_settings: Any) -> None:
    from sglang.srt.runtime_context import get_spec

    why = "not supported: speculative decoding of this kind"
    for algorithm, topk in (("NGRAM", 1), ("DFLASH", 1), ("EAGLE", 4)):
        with get_spec().override(speculative_algorithm=algorithm, speculative_eagle_topk=topk):
            assert engine.refusal(speculating(), dsv4_bridge=True) == why


def test_window_layers_stay_native_but_those_of_deepseek_v4(chain: None) -> None:
    hybrid = speculating(is_hybrid_swa=True)
    hybrid.model_config.full_attention_layer_ids = [1]
    assert "speculative decoding of this kind" in (engine.refusal(hybrid, dsv4_bridge=True) or "")
    compressed = speculating(is_hybrid_swa=True)
    compressed.model_config.hf_config.architectures = ["DeepseekV4ForCausalLM"]
    assert engine.refusal(compressed, dsv4_bridge=True) is None

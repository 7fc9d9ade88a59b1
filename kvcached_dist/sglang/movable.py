"""Why what a prefix cache keeps cannot be moved in an engine: what would stay behind is named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import engine, specs

_LISTS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
_TWO_LISTS = "SWATokenToKVPoolAllocator"
_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool", "DeepSeekV4TokenToKVPool")
"""Pools whose buffers are all elastic where they are taken over."""


def unsupported(domains: Iterable[str], scheduler: Any, stages: int, *, drafts_too: bool) -> str:
    """Why nothing can be moved; empty: it can.

    Args:
        domains: those that have elastic ids.
        scheduler: the engine's, with its prefix cache.
        stages: pipeline stages.
        drafts_too: what a draft model keeps is among what would be moved.

    Raises:
        AttributeError: this version of the engine has no such thing.
    """
    token_domains = set(domains) - {specs.ROWS}
    if stages > 1:
        return "pipeline stages"
    if not token_domains <= {specs.FULL, specs.SWA}:
        return "pools besides those of full attention and of a window"
    cache = scheduler.tree_cache
    if type(cache).__name__ != "UnifiedRadixCache" or type(cache.tree_core).__name__ != "UnifiedTreeCore":
        over = f" over a {type(cache.tree_core).__name__}" if hasattr(cache, "tree_core") else ""
        return f"the prefix cache is a {type(cache).__name__}{over}"
    allocator = cache.token_to_kv_pool_allocator
    pool, features = allocator.get_kvcache(), engine.context("exec").features
    kinds = [kind.name.lower() for kind in cache.tree_components]
    found = {
        "the prefix cache is off": bool(cache.disable),
        f"nodes of {' and '.join(kinds)}": kinds[0] != specs.FULL or set(kinds) != token_domains,
        "a host or external cache": cache.cache_controller is not None or cache.linker is not None,
        f"a {type(allocator).__name__}": not _known(allocator),
        "a window that is a ring of each request": bool(getattr(allocator, "swa_req_ring", False)),
        f"a {type(pool).__name__}": type(pool).__name__ not in _POOLS,
        "an indexer of two buffers": any(
            part.uses_aiter_fp4_layout for part in getattr(pool, "index_pools", {}).values()
        ),
        "speculative decoding with pools of its own": engine.context("spec").speculative_algorithm is not None
        and not drafts_too,
        # They keep something of their own beside each token's place.
        "routed experts or indexer choices that are returned": bool(
            getattr(features, "enable_return_routed_experts", False)
            or getattr(features, "enable_return_indexer_topk", False)
        ),
        "the KV canary": getattr(scheduler.tp_worker.model_runner, "canary_manager", None) is not None,
    }
    return ", ".join(what for what, so in found.items() if so)


def parts_of(allocator: Any) -> list[Any]:
    """An allocator and those inside it."""
    if type(allocator).__name__ != _TWO_LISTS:
        return [allocator]
    return [allocator, allocator.full_attn_allocator, allocator.swa_attn_allocator]


def _known(allocator: Any) -> bool:
    whole, *inner = parts_of(allocator)
    return all(type(part).__name__ in _LISTS for part in inner or [whole])


__all__ = ["parts_of", "unsupported"]

"""The engine's own prefix cache over allocators of a test, and prompts to keep in it."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from kvcached_dist.sglang.runtime import Phase, Runtime

PROMPTS = ([0, 1, 2], [0, 1, 3, 4], [5], [6, 7], [6, 8, 9, 10], [11, 12], [13], [14, 15, 16])
"""Prompts in blocks that are equal or not; some begin alike, so some nodes have children."""


def prefix_cache(allocator: Any, page: int, *components: str, **more: Any) -> Any:
    """What the engine chooses by itself.

    Args:
        allocator: the engine's.
        page: tokens of a block.
        components: names of what a node holds.
        more: parameters of the engine's cache.
    """
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    of_a_node = tuple(ComponentType[name] for name in components)
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=page,
        tree_components=of_a_node, **more,
    )  # fmt: skip
    return UnifiedRadixCache(params)


def idle_scheduler(page: int, cache: Any) -> Any:
    """As much of the engine's scheduler, with nothing to do, as moving asks for.

    Args:
        page: tokens of a block.
        cache: its prefix cache.
    """
    from sglang.srt.session.session_controller import SessionController

    return SimpleNamespace(
        page_size=page, tree_cache=cache, is_fully_idle=lambda: True, session_controller=SessionController(cache),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(canary_manager=None)),
    )  # fmt: skip


def keep(cache: Any, prompt: list[int], ids: torch.Tensor) -> None:
    """A prompt has been computed and stays in the cache.

    Args:
        cache: the engine's.
        prompt: what its blocks hold.
        ids: int64, one for each token.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tokens = array("q", [1000 * block + k for block in prompt for k in range(len(ids) // len(prompt))])
    cache.insert(InsertParams(key=RadixKey(tokens), value=ids))


@contextlib.contextmanager
def node_by_node(runtime: Runtime) -> Iterator[None]:
    """Evictions inside go as in an engine with native pools; what enters a list is looked at all the same."""
    phase, runtime.phase = runtime.phase, Phase.NATIVE
    try:
        yield
    finally:
        runtime.phase = phase


def watch_entering(known: Any, looks: list[tuple[str, int]], patch: Any) -> None:
    """Note name and length each time that ids are about to enter a list.

    Args:
        known: the list.
        looks: the notes.
        patch: pytest's ``monkeypatch``.
    """
    admit = known.admit

    def noted(ids: torch.Tensor) -> Any:
        looks.append((known.book.name, len(ids)))
        return admit(ids)

    patch.setattr(known, "admit", noted)

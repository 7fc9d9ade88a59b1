"""What the engine's ``torch_native`` attention lacks for the empty and padded batches of DP attention on a CPU.

Where one data-parallel rank computes, all do: one without requests takes part with no token at all, or with tokens
that only fill up. Two things are missing for that, natively and elastically alike: the length that a filler has, and
a rotary embedding of no token. Loaded by the engine as a plugin, in force with DP_ATTENTION=1.
"""

from __future__ import annotations

import os
from typing import Any

FILLER_LENGTH = 1
"""Tokens of a request that only fills up a batch: it reads its own, in the null block. With 0 attention has no key."""


def register() -> None:
    """Entry point of the engine's plugin group."""
    if os.environ.get("DP_ATTENTION") != "1":
        return
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Not a hook: there is nothing that it could wrap.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _backend: FILLER_LENGTH
    rotary = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native"
    HookRegistry.register(rotary, _nothing_to_rotate, HookType.AROUND)


def _nothing_to_rotate(
    original: Any, embedding: Any, positions: Any, query: Any, key: Any, *rest: Any, **options: Any
) -> Any:
    if not positions.numel():
        return query, key
    return original(embedding, positions, query, key, *rest, **options)

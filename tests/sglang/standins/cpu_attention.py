"""What the engine's ``torch_native`` attention lacks for MLA, for sliding-window hybrids and for speculative decoding.

It reads window layers at ids of full attention, computes the latent of MLA only in the absorbed form and does not know
how long drafts are. That is put right here, natively and elastically alike. Loaded by the engine as a plugin, in force
with CPU_ATTENTION=1.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch


def register() -> None:
    """Entry point of the engine's plugin group."""
    if os.environ.get("CPU_ATTENTION") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend."
    HookRegistry.register(f"{backend}__init__", _always_absorbed, HookType.AFTER)
    HookRegistry.register(f"{backend}forward_extend", _read_windows, HookType.AROUND)
    HookRegistry.register(f"{backend}forward_decode", _read_windows, HookType.AROUND)
    HookRegistry.register(f"{backend}forward_extend", _verify_drafts, HookType.AROUND)
    draft = "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend"
    HookRegistry.register(draft, _draft_backend, HookType.AROUND)


def _always_absorbed(_result: None, _backend: Any, *_: Any, **__: Any) -> None:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    absorbed = handlers.AttnForwardMethod.MLA
    handlers.AttentionBackendRegistry.register("torch_native", lambda _attention, _batch: absorbed)


def _read_windows(original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **options: Any) -> Any:
    """Window layers read the rows that the window ids name. Tokens behind the window read the null row, masked."""
    pool, rows = backend.token_to_kv_pool, backend.req_to_token_pool
    if not backend.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
        return original(backend, q, k, v, layer, *args, **options)
    translated = pool.translate_loc_from_full_to_swa(rows.req_to_token.long())
    backend.req_to_token_pool = SimpleNamespace(req_to_token=translated)
    try:
        return original(backend, q, k, v, layer, *args, **options)
    finally:
        backend.req_to_token_pool = rows


def _verify_drafts(
    original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **options: Any
) -> Any:
    """Draft tokens are verified as an extension of what is there; the engine gives no lengths for it."""
    mode = batch.forward_mode
    if not mode.is_target_verify():
        return original(backend, q, k, v, layer, batch, *args, **options)
    count = len(q) // len(batch.seq_lens)
    shown = SimpleNamespace(
        out_cache_loc=batch.out_cache_loc,
        req_pool_indices=batch.req_pool_indices,
        encoder_lens=None,
        seq_lens=batch.seq_lens + count,
        extend_prefix_lens=batch.seq_lens,
        extend_seq_lens=torch.full_like(batch.seq_lens, count),
    )
    return original(backend, q, k, v, layer, shown, *args, **options)


def _draft_backend(_original: Any, factory: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(factory.draft_model_runner)

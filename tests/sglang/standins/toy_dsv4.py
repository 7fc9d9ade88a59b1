"""DeepSeek-V4 on a machine without a card: the engine's own control plane, pools and communication, toy arithmetic.

Every layer of the toy writes and reads every pool at the addresses that the engine allocated: SWA, C4, C128 and
indexer rows, the C4 rings behind window pages, the C128 ring behind the request row. So a block that is not backed
faults, and one that holds other bytes changes the tokens. Loaded by the engine as a plugin, in force with TOY_DSV4=1.
"""

from __future__ import annotations

import os
from typing import Any

import torch

LANES = 32
"""Bytes of a row that the toy uses; the first of the row's data part."""

MIX = torch.sin(torch.arange(LANES * LANES, dtype=torch.float32).reshape(LANES, LANES) * 0.37 + 1.0) / LANES**0.5


def register() -> None:
    """Entry point of the engine's plugin group."""
    if os.environ.get("TOY_DSV4") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    srt = "sglang.srt."
    around = (
        (f"{srt}configs.update_config.adjust_config_with_unaligned_cpu_tp", _leave_heads_alone),
        (f"{srt}layers.rotary_embedding.factory.get_rope_wrapper", _generic_rope),
        (f"{srt}mem_cache.kv_cache_configurator.KVCacheConfigurator.configure", _without_cpu_rules),
    )
    for target, hook in around:
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.register(f"{srt}models.deepseek_v4.DeepseekV4Model.forward", forward, HookType.REPLACE)
    HookRegistry.register(f"{srt}models.deepseek_v4_nextn.DeepseekV4ModelNextN.forward", draft, HookType.REPLACE)
    # The draft model is told to share the target's embedding, and empties the cache of the device then.
    vars(torch.cpu).setdefault("empty_cache", lambda: None)
    backend = f"{srt}layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend"
    HookRegistry.register(f"{backend}.init_forward_metadata", _no_metadata, HookType.REPLACE)


def _leave_heads_alone(_original: Any, model_config: Any, *_: Any, **__: Any) -> Any:
    """The one latent head is not to be padded up to the number of ranks."""
    return model_config


def _generic_rope(original: Any, *args: Any, **options: Any) -> Any:
    if options.get("device") == "cpu":
        options["device"] = None
    return original(*args, **options)


def _without_cpu_rules(original: Any, configurator: Any, **options: Any) -> Any:
    """FP8 is only stored here, never computed with, so what the processor can do with it does not matter."""
    import sglang.srt.mem_cache.kv_cache_configurator as module

    platform = module.current_platform

    class NotCpu:
        def is_cpu(self) -> bool:
            return False

        def __getattr__(self, name: str) -> Any:
            return getattr(platform, name)

    module.current_platform = NotCpu()
    try:
        return original(configurator, **options)
    finally:
        module.current_platform = platform


def _no_metadata(backend: Any, _batch: Any) -> None:
    backend.forward_metadata = None


def _rows(buffer: torch.Tensor, page_size: int, stride: int, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the toy's bytes of these rows in a paged byte buffer."""
    return (where // page_size)[:, None], (where % page_size * stride)[:, None] + torch.arange(LANES)


def _store(buffer: torch.Tensor, page_size: int, stride: int, where: torch.Tensor, value: torch.Tensor) -> None:
    buffer[_rows(buffer, page_size, stride, where)] = (torch.tanh(value) * 100 + 128).round().to(torch.uint8)


def _load(buffer: torch.Tensor, page_size: int, stride: int, where: torch.Tensor) -> Any:
    """What all these rows say together; their order matters."""
    rows = (buffer[_rows(buffer, page_size, stride, where)].float() - 128) / 100
    age = torch.cos(torch.arange(len(where), dtype=torch.float32) * 0.61)
    return (rows * age[:, None]).sum(0) / len(where) ** 0.5


class _Token:
    """One token of one request in one layer."""

    def __init__(self, pool: Any, table: torch.Tensor, row: int, position: int, layer: int) -> None:
        self.pool, self.row, self.position, self.layer = pool, row, position, layer
        self.item = pool.layer_mapping[layer]
        self.full = table[row, : position + 1].long()
        first = max(0, position + 1 - pool.sliding_window)
        self.window = pool.translate_loc_from_full_to_swa(self.full[first:]).long()

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        seen = MIX @ hidden[:LANES] + 0.1 * self.layer
        kv = self.pool.swa_kv_pool
        buffer = kv.kv_buffer[self.layer - self.pool._stage_start]
        _store(buffer, kv.page_size, 576, self.window[-1:], seen)
        found = _load(buffer, kv.page_size, 576, self.window)
        if self.item.compress_ratio:
            found = found + self._compressed(seen)
        return torch.cat((torch.tanh(hidden[:LANES] + MIX.T @ found), hidden[LANES:]))

    def _compressed(self, seen: torch.Tensor) -> torch.Tensor:
        ratio, pool = self.item.compress_ratio, self.item.compress_kv_pool
        buffer = pool.kv_buffer[self.item.compress_layer_id]
        states = [self.pool.compress_state_pools[self.layer], self.pool.indexer_compress_state_pools[self.layer]]
        entries = (self.position + 1) // ratio
        total = torch.zeros(LANES)
        for number, state in enumerate(state for state in states if state is not None):
            where = self._state_rows(state)
            scores = state.kv_score_buffer.kv_score
            scores[where[-1], :LANES] = torch.tanh(seen + number).to(scores.dtype)
            if (self.position + 1) % ratio == 0:
                value, target = scores[where, :LANES].float().mean(0) * 3, self.full[-1:] // ratio
                if number == 0:
                    _store(buffer, pool.page_size, 576, target, value)
                else:
                    index = self.pool.c4_indexer_kv_pool
                    keys = index.index_k_with_scale_buffer[self.item.compress_layer_id]
                    _store(keys, index.page_size, index.index_head_dim, target, value)
        if entries:
            where = self.full[torch.arange(entries) * ratio + ratio - 1] // ratio
            total = total + _load(buffer, pool.page_size, 576, where)
            if ratio == 4:
                index = self.pool.c4_indexer_kv_pool
                keys = index.index_k_with_scale_buffer[self.item.compress_layer_id]
                total = total + _load(keys, index.page_size, index.index_head_dim, where)
        return total

    def _state_rows(self, state: Any) -> Any:
        """State rows of the tokens since the last compressed entry, this one last."""
        since = self.position % state.ratio
        if state.ratio == 4:
            return state.translate_from_swa_loc_to_state_loc(self.window[-(since + 1) :].clone())
        positions = torch.arange(self.position - since, self.position + 1)
        return self.row * state.ring_size + positions % state.ring_size


def forward(
    model: Any, input_ids: Any, _positions: Any, batch: Any, _embeds: Any = None, pp_proxy_tensors: Any = None
) -> Any:
    """Stands for the layers of this stage."""
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    if model.pp_group.is_first_rank:
        hidden = _embedded(input_ids, model.embed_tokens.embedding_dim)
    else:
        hidden = pp_proxy_tensors["hidden_states"].float()
    hidden = _through(hidden, batch, range(model.start_layer, model.end_layer))
    if not model.pp_group.is_last_rank:
        return PPProxyTensors({"hidden_states": hidden.to(torch.bfloat16).contiguous()})
    hidden = hidden.to(torch.bfloat16)
    return model.norm(hidden), hidden.repeat(1, model.hc_mult)


def draft(model: Any, input_ids: Any, _positions: Any, batch: Any, _embeds: Any = None) -> Any:
    """Stands for the one window-only layer of the draft model, which goes on from what the target has computed."""
    width = model.config.hidden_size
    hidden = _embedded(input_ids, width) + batch.spec_info.hidden_states[:, :width].float()
    hidden = _through(hidden, batch, range(1)).to(torch.bfloat16)
    return model.shared_head.norm(hidden), hidden.repeat(1, model.hc_mult)


def _embedded(input_ids: torch.Tensor, width: int) -> torch.Tensor:
    """From the ids alone, so that the tokens do not depend on how weights are drawn and cut."""
    wave = torch.arange(1, width + 1, dtype=torch.float32)
    return torch.sin(input_ids[:, None].float() * wave * 0.013 + 0.5)


def _through(hidden: torch.Tensor, batch: Any, layers: range) -> torch.Tensor:
    """All tokens of a batch through these layers, one after the other."""
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

    if not len(hidden) or batch.forward_mode.is_idle():
        return hidden
    pool, table = get_token_to_kv_pool(), get_attn_backend().req_to_token
    done: list[torch.Tensor] = []
    for row, end, length in zip(batch.req_pool_indices.tolist(), *_spans(batch, len(hidden)), strict=True):
        for position in range(end - length, end):
            value = hidden[len(done)]
            for layer in layers:
                value = _Token(pool, table, row, position, layer).run(value)
            done.append(value)
    return torch.stack(done)


def _spans(batch: Any, tokens: int) -> tuple[list[int], list[int]]:
    """Where the tokens of each request end, and how many they are."""
    ends: list[int] = batch.seq_lens.tolist()
    mode = batch.forward_mode
    if mode.is_target_verify():
        # Drafts lie behind what is committed.
        count = tokens // len(ends)
        return [end + count for end in ends], [count] * len(ends)
    lengths = batch.extend_seq_lens.tolist() if mode.is_extend(include_draft_extend_v2=True) else [1] * len(ends)
    return ends, lengths

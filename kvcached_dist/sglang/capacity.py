"""How many tokens a rank could ever hold: the engine sizes by the memory that is free now, elastic pools by the card.

A prompt that no rank could hold must get the engine's own error instead of blocking the queue, so the engine is told
the least number of all ranks before it builds anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..coord.core.errors import ConfigError
from . import engine, specs

if TYPE_CHECKING:
    from ..config import Config
    from .drafts import Draft

CUDA_GRANULE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class TokenCost:
    """What a token of the engine's capacity costs this rank.

    Attributes:
        token_bytes: bytes of a token in the pools that are counted one to one; compressed pools hold fractions.
        window_bytes: bytes of a token in the pools of window layers.
        window_share: window tokens per token of capacity.
        lanes: buffers; each can share a granule with a neighbour at either end.
        fixed_bytes: bytes of what does not depend on the capacity: request rows.
    """

    token_bytes: float
    window_bytes: float = 0
    window_share: float = 0.0
    lanes: int = 0
    fixed_bytes: int = 0

    @property
    def bytes(self) -> float:
        """Bytes per token of capacity, window pools included."""
        return self.token_bytes + self.window_share * self.window_bytes


def token_cost(configurator: Any, sizes: Any, draft: Draft | None = None) -> TokenCost:
    """What this rank's share of the model costs per token.

    Args:
        configurator: the engine's ``KVCacheConfigurator``.
        sizes: the sizes that it derived.
        draft: draft model whose tokens are backed with the target's.
    """
    if engine.is_dsv4(configurator):
        return _compressed_cost(configurator, sizes, draft)
    costs = _plain_cost(configurator, sizes)
    if draft is None:
        return costs
    return replace(costs, token_bytes=costs.token_bytes + draft.token_bytes, lanes=costs.lanes + draft.lanes)


def _plain_cost(configurator: Any, sizes: Any) -> TokenCost:
    """K and V heads, latents, and hybrids of heads."""
    model, parallel, info = configurator.model_config, engine.parallel_of(configurator), configurator.layer_info
    item = configurator.kv_cache_dtype.itemsize
    layers = info.end_layer - info.start_layer
    if configurator.use_mla_backend:
        # Every rank keeps the whole latent, whatever the tensor-parallel size.
        row = model.kv_lora_rank + model.qk_rope_head_dim
        return TokenCost(row * item * layers, lanes=layers)
    heads = model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
    row = heads * (model.head_dim + (getattr(model, "v_head_dim", None) or model.head_dim)) * item
    if not configurator.is_hybrid_swa:
        return TokenCost(row * layers, lanes=2 * layers)
    full, window = len(model.full_attention_layer_ids), len(model.swa_attention_layer_ids)
    # Models without a geometry of their own for window layers use that of the others.
    window_row = row
    if configurator.is_hybrid_swa_compress:
        window_heads = model.get_swa_num_kv_heads(parallel.attn_tp_size)
        window_row = window_heads * (model.swa_head_dim + model.swa_v_head_dim) * item
    share = sizes.swa_max_total_num_tokens / max(1, sizes.full_max_total_num_tokens)
    return TokenCost(row * full, window_row * window, share, 2 * (full + window))


def _compressed_cost(configurator: Any, sizes: Any, draft: Draft | None) -> TokenCost:
    """DeepSeek-V4: what its pages cost over all pools that follow them."""
    full, window = int(sizes.full_max_total_num_tokens), int(sizes.swa_max_total_num_tokens)
    stage = specs.dsv4_stage(
        configurator, full_tokens=full, swa_tokens=window, request_slots=int(sizes.max_running_requests) + 1,
        draft=draft,
    ).stage  # fmt: skip
    page = int(configurator.pool_page_size)
    rows = sum(pool.static_bytes(stage.blocks(pool)) for pool in stage.pools if pool.domain == specs.ROWS)
    return TokenCost(
        stage.page_bytes(specs.FULL) / page,
        stage.page_bytes(specs.SWA) / page,
        window / full,
        sum(pool.lanes for pool in stage.pools),
        rows,
    )


def fitting_tokens(configurator: Any, sizes: Any, config: Config, draft: Draft | None = None) -> int:
    """Tokens that the physical memory of this rank could hold beside its reserve, in whole pages of the engine.

    Args:
        configurator: the engine's ``KVCacheConfigurator``.
        sizes: the sizes that it derived.
        config: settings.
        draft: draft model whose tokens are backed with the target's.
    """
    page, costs = int(configurator.pool_page_size), token_cost(configurator, sizes, draft)
    if configurator.device == "cpu":
        usable, granule = config.host_capacity_bytes, config.host_granule_bytes
    else:
        free_and_total = torch.cuda.mem_get_info(configurator.gpu_id)
        own = torch.cuda.memory_reserved(configurator.gpu_id)
        usable, granule = int(free_and_total[1] * config.gpu_utilization) - own, CUDA_GRANULE_BYTES
    # The null page of every pool, and one shared granule at either end of every lane.
    null_pages = math.ceil((costs.token_bytes + costs.window_bytes) * page)
    usable -= costs.lanes * 2 * granule + null_pages + costs.fixed_bytes
    return max(0, int(usable // (costs.bytes * page)) * page)


def cut(sizes: Any, tokens: int, configurator: Any) -> Any:
    """The engine's sizes with less capacity; window tokens keep their share.

    Args:
        sizes: the sizes that the engine derived.
        tokens: what every rank could hold, in whole pages.
        configurator: the engine's ``KVCacheConfigurator``.

    Raises:
        ConfigError: window layers could not admit a single request.
    """
    if tokens <= 0:
        raise ConfigError(
            "the smallest rank could not hold a single page of tokens beside its reserve: raise"
            " KVCACHED_GPU_UTILIZATION (on the host backend KVCACHED_DIST_HOST_CAPACITY_BYTES) or free its memory"
        )
    fields = {name: getattr(sizes, name) for name in type(sizes).__struct_fields__}
    fields["max_total_num_tokens"] = tokens
    if configurator.is_hybrid_swa:
        page = int(configurator.pool_page_size)
        share = sizes.swa_max_total_num_tokens / max(1, sizes.full_max_total_num_tokens)
        window = int(tokens * share) // page * page
        least = int(configurator.sliding_window_size or 0) + page
        if window <= least:
            raise ConfigError(
                f"the smallest rank could hold {tokens} tokens beside its reserve, {window} of them in window layers;"
                f" a request needs more than {least} there: lower the reserve or raise KVCACHED_GPU_UTILIZATION (on the"
                " host backend KVCACHED_DIST_HOST_CAPACITY_BYTES)"
            )
        fields |= {"full_max_total_num_tokens": tokens, "swa_max_total_num_tokens": window}
        if engine.is_dsv4(configurator):
            # Compressed entries follow full tokens, states of windows follow their pages; request states follow rows.
            fields |= {
                "c4_max_total_num_tokens": tokens // 4,
                "c128_max_total_num_tokens": tokens // 128,
                "c4_state_pool_size": sizes.c4_state_pool_size * window // sizes.swa_max_total_num_tokens,
            }
    return type(sizes)(**fields)

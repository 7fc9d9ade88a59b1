"""Hybrids of attention and recurrent state: one slot of convolution and temporal state per request.

Native shapes (SGLang 0.5.20, ``MambaPool``): ``[layers, slots + 1, channels, kernel - 1]`` for the
convolution and ``[layers, slots + 1, heads, dim, state]`` for the temporal state; slot 0 is padding. Both
are sharded over tensor-parallel ranks. Speculative intermediate buffers live differently and stay with
the engine. Dimensions are those of the published ``config.json`` of the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...coord.core.errors import ConfigError
from ..dtypes import DTYPE_BYTES
from ..sizing import DomainPlan, ModelPlan
from ..specs import FillPiece, PoolSpec
from .attention import KV_DTYPES, head_pools, token_domain
from .registry import blocks_per_page, register, require_choice, require_positive, shard_heads


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Dimensions of a hybrid model.

    Attributes:
        num_layers: layers.
        attention_layers: layers with KV; the others have recurrent state.
        kv_heads: KV heads over all ranks.
        head_dim: dimensions of a KV head.
        key_heads: key heads (groups) of the recurrent layers.
        value_heads: value heads of the recurrent layers.
        value_head_dim: dimensions of a value head.
        state_dim: dimensions of a key head: the width of the temporal state.
        conv_kernel: taps of the convolution.
    """

    num_layers: int
    attention_layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    value_head_dim: int
    state_dim: int
    conv_kernel: int = 4

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers with recurrent state."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.attention_layers)

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution over all ranks: values, keys and queries."""
        return self.value_heads * self.value_head_dim + 2 * self.key_heads * self.state_dim


def _state_pool(name: str, layers: tuple[int, ...], row_shape: tuple[int, ...], dtype: str) -> PoolSpec:
    row_bytes = prod(row_shape) * DTYPE_BYTES[dtype]
    fill = (FillPiece(0, row_bytes),)
    return PoolSpec(name, "mamba", row_bytes, layers, row_shape, dtype, fill_row_bytes=row_bytes, fill=fill)


def recurrent(
    name: str,
    config: RecurrentConfig,
    *,
    page_size: int = 16,
    tp_size: int = 1,
    kv_dtype: str = "bfloat16",
    conv_dtype: str = "bfloat16",
    state_dtype: str = "float32",
    state_slots: int = 0,
    mamba_memory_ratio: float = 0.9,
) -> ModelPlan:
    """Pools of a hybrid of attention and recurrent layers.

    Args:
        name: name of the model.
        config: dimensions.
        page_size: tokens of a KV block.
        tp_size: ranks that share heads and channels.
        kv_dtype: element type of the KV cache.
        conv_dtype: element type of the convolution state.
        state_dtype: element type of the temporal state.
        state_slots: usable state slots; 0: from the capacity.
        mamba_memory_ratio: with ``state_slots=0``, state memory as a ratio of KV memory.

    Raises:
        ConfigError: an option does not work; names it and a value that would.
    """
    require_positive(name, page_size=page_size, tp_size=tp_size, mamba_memory_ratio=mamba_memory_ratio)
    require_choice(name, "kv_dtype", kv_dtype, KV_DTYPES)
    for option, value in (("conv_dtype", conv_dtype), ("state_dtype", state_dtype)):
        require_choice(name, option, value, ("bfloat16", "float16", "float32"))
    if not config.attention_layers or not config.recurrent_layers:
        raise ConfigError(f"model {name!r}: needs at least one attention layer and one recurrent layer")
    if state_slots < 0 or config.value_heads % tp_size or config.conv_channels % tp_size:
        raise ConfigError(
            f"model {name!r}: state_slots={state_slots} must be at least 0, and {config.value_heads} value heads and"
            f" {config.conv_channels} channels must divide over tp_size={tp_size}"
        )
    heads = shard_heads(name, "KV heads", config.kv_heads, tp_size)
    dims = (config.head_dim, config.head_dim)
    pools = head_pools("mha", "full", config.attention_layers, heads, dims, kv_dtype, page_size)
    conv_shape = (config.conv_channels // tp_size, config.conv_kernel - 1)
    temporal_shape = (config.value_heads // tp_size, config.value_head_dim, config.state_dim)
    pools.append(_state_pool("mamba_conv", config.recurrent_layers, conv_shape, conv_dtype))
    pools.append(_state_pool("mamba_state", config.recurrent_layers, temporal_shape, state_dtype))
    widest = max(pool.block_bytes for pool in pools if pool.domain == "mamba")
    ratio = 0.0 if state_slots else mamba_memory_ratio
    slots = DomainPlan("mamba", 0, blocks_per_page(0, widest), slots=state_slots, memory_ratio=ratio)
    domains = (token_domain("full", pools, page_size, 0, 1.0), slots)
    return ModelPlan(name, config.num_layers, domains, tuple(pools), tp_size=tp_size)


register(
    "qwen3-next-80b",
    recurrent,
    RecurrentConfig(
        48, tuple(range(3, 48, 4)), 2, 256, key_heads=16, value_heads=32, value_head_dim=128, state_dim=128
    ),
)
register(
    "tiny-mamba",
    recurrent,
    RecurrentConfig(4, (1, 3), 2, 24, key_heads=2, value_heads=4, value_head_dim=20, state_dim=12),
    state_slots=15,
)

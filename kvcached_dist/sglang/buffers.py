"""The engine's buffers as views of reservations, made where the engine makes its own.

Graphs are captured over these tensors and pointers into them are cached right after they are made, so they are never
swapped afterwards. The null page and the sentinel rows behind them are backed before the first one exists.
"""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import torch

from ..coord.core.errors import ConfigError
from ..pools.backing import StageBacking


def head_buffers(backing: StageBacking, prefix: str, pool: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V buffers of every local layer of an ``MHATokenToKVPool``.

    Args:
        backing: pools of this stage.
        prefix: of the names of its pools: ``mha``, ``swa`` or ``draft``.
        pool: the engine's pool, about to create its buffers.

    Raises:
        ConfigError: the pool is not the one that was described.
    """
    shapes = pool._kv_buffer_shapes()
    layers = range(pool.layer_num)
    if any(spec.name == f"{prefix}_kv" for spec in backing.stage.pools):
        made = [[_lane(backing, f"{prefix}_kv", 2 * i + v, shapes[v], pool) for i in layers] for v in (0, 1)]
    else:
        made = [[_lane(backing, f"{prefix}_{part}", i, shapes[v], pool) for i in layers] for v, part in enumerate("kv")]
    return made[0], made[1]


def latent_buffers(backing: StageBacking, pool: Any, name: str = "mla_kv") -> list[torch.Tensor]:
    """One buffer per local layer of an ``MLATokenToKVPool``.

    Args:
        backing: pools of this stage.
        pool: the engine's pool, about to create its buffers.
        name: of its pool: ``mla_kv`` or ``draft_kv``.

    Raises:
        ConfigError: the pool is not the one that was described.
    """
    shape = (pool.size + pool.page_size, 1, int(pool.kv_cache_dim))
    return [_lane(backing, name, layer, shape, pool) for layer in range(pool.layer_num)]


def _lane(backing: StageBacking, name: str, index: int, shape: tuple[int, ...], pool: Any) -> torch.Tensor:
    """A view of the native shape. It may end before the reservation does: pages of single tokens are rounded up."""
    spec = backing.stage.pool(name)
    dtype = str(pool.store_dtype).removeprefix("torch.")
    if (dtype, tuple(shape[1:])) != (spec.dtype, spec.row_shape) or pool.layer_num != len(spec.layers):
        raise ConfigError(
            f"pool {name}: the engine makes {pool.layer_num} layers of {tuple(shape[1:])} {dtype}, expected"
            f" {len(spec.layers)} of {spec.row_shape} {spec.dtype}: this layout is not known; unset ENABLE_KVCACHED"
        )
    return backing.layer(name, index, dtype, shape)


class Dsv4Buffers:
    """Buffers of the DeepSeek-V4 pools that one ``DeepSeekV4TokenToKVPool`` is creating, layer by layer.

    Args:
        backing: pools of this stage.
        page_size: tokens of the engine's page.
        draft: it is that of a draft model, which has window layers only.
    """

    def __init__(self, backing: StageBacking, page_size: int, *, draft: bool = False) -> None:
        self._backing = backing
        self._draft = draft
        self._pages = {page_size: "swa_kv", page_size // 4: "c4_kv", page_size // 128: "c128_kv"}
        if draft:
            self._pages = {page_size: "draft_swa_kv"}
        self._taken: Counter[str] = Counter()

    @property
    def layers(self) -> int:
        """Layers that were taken over so far, in all pools."""
        return self._taken.total()

    def page_buffer(self, pool: Any, num_pages: int) -> torch.Tensor:
        """Next layer of a KV pool: SWA, C4 or C128, told apart by the tokens of their pages."""
        name = self._pages.get(pool.page_size)
        if name is None:
            raise ConfigError(f"the engine makes pages of {pool.page_size} tokens, expected {list(self._pages)}")
        spec = self._backing.stage.pool(name)
        row_bytes = pool.get_bytes_per_token()
        padded = -(-pool.page_size * row_bytes // 576) * 576
        if padded != spec.block_bytes:
            raise ConfigError(f"pool {name}: a page has {padded} bytes in this engine, expected {spec.block_bytes}")
        pool.kv_cache_total_dim, pool.bytes_per_page_padded = row_bytes, padded
        return self._next(name, (num_pages, padded), pool.store_dtype)

    def indexer_buffers(self, pool: Any) -> list[torch.Tensor]:
        """All layers of the packed indexer."""
        pages = (pool.size + pool.page_size + 1) // pool.page_size
        shape = (pages, pool.page_size * pool.get_bytes_per_token())
        return [self._next("c4_indexer", shape, torch.uint8) for _ in range(pool.layer_num)]

    def state_buffer(self, pool: Any, dtype: torch.dtype) -> torch.Tensor:
        """Next layer of a compressor state."""
        if pool.ratio == 128:
            name = "c128_state"
        else:
            attention = self._backing.stage.pool("c4_state").row_shape[0]
            name = "c4_state" if pool.last_dim == attention else "c4_indexer_state"
        return self._next(name, (pool._size, pool.last_dim), dtype)

    def _next(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        spec, index = self._backing.stage.pool(name), self._taken[name]
        if index >= spec.buffers:
            raise ConfigError(f"pool {name}: the engine makes more layers than the {spec.buffers} that are expected")
        native = spec.native_shape(self._backing.stage.blocks(spec))
        if shape != native or str(dtype) != f"torch.{spec.dtype}":
            raise ConfigError(
                f"pool {name}: the engine makes {shape} of {dtype}, expected {native} of {spec.dtype}: this layout is"
                " not known; unset ENABLE_KVCACHED or set KVCACHED_SGLANG_DSV4_KV_POOL_BRIDGE=0"
            )
        self._taken[name] += 1
        return self._backing.layer(name, index)

    def finish(self) -> None:
        """Every buffer of every pool was taken over.

        Raises:
            ConfigError: names the pools that the engine made by itself.
        """
        mine = [spec for spec in self._backing.stage.pools if spec.draft == self._draft]
        left = [spec.name for spec in mine if self._taken[spec.name] != spec.buffers]
        if left:
            raise ConfigError(f"the engine did not create {', '.join(left)} where they are taken over")


def no_memory_saver(device: str) -> tuple[Any, bool, Any]:
    """What the engine's state pools keep beside their buffer: adapter, custom pool in use, custom pool."""
    states = importlib.import_module("sglang.srt.mem_cache.deepseek_v4_compress_state")
    enabled, custom, _ = states.maybe_init_custom_mem_pool(device=device)
    return states.TorchMemorySaverAdapter.create(enable=False), enabled, custom


def kv_and_score(buffer: torch.Tensor) -> Any:
    """The engine's wrapper of a state buffer."""
    return importlib.import_module("sglang.srt.mem_cache.deepseek_v4_compress_state").KVAndScore(buffer)

"""Draft models of speculative decoding, whose pools are indexed by the ids of their target.

So they are further pools of its domain: a page is published only when every rank has mapped the layers of the draft
too, and both are given back together. The engine loads the draft model before it makes the first pool, so its live
model says what it is going to create; nothing is derived from configuration files. Where it cannot be said, or the
engine creates something else after all, the draft's pool stays with the engine: every published id is good in it,
because it has all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..coord.core.errors import ConfigError
from ..pools.catalogue.attention import head_pools, token_pool
from . import buffers, engine, specs

if TYPE_CHECKING:
    from ..pools.specs import PoolSpec
    from .runtime import Runtime
    from .starting import Starting

_log = logging.getLogger("kvcached_dist.sglang")

PREFIX = "draft"
"""Of the names of its pools."""

TOKENS = ("max_total_num_tokens", "full_max_total_num_tokens", "swa_max_total_num_tokens")
"""Sizes that a draft model has from its target."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a draft model keeps per token on a rank; the same on all ranks that share the ids.

    Attributes:
        layers: layers, each with buffers of its own.
        heads: K and V heads of this rank; 0: one latent per token.
        dims: dimensions of a K head and of a V head; of the latent, and 0; of a window layer of DeepSeek-V4 those
            without and with positions.
        dtype: element type that the cache is for.
    """

    layers: int
    heads: int
    dims: tuple[int, int]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token over all layers."""
        return self.layers * max(1, self.heads) * sum(self.dims) * self.dtype.itemsize

    @property
    def lanes(self) -> int:
        """Buffers over all layers."""
        return self.layers * (2 if self.heads else 1)

    def pools(self, first_layer: int, page_size: int) -> tuple[PoolSpec, ...]:
        """Its pools in the target's domain.

        Args:
            first_layer: layers of the target, behind which its own are counted on.
            page_size: tokens of a page.
        """
        layers = tuple(range(first_layer, first_layer + self.layers))
        stored = specs.stored_name(self.dtype)
        if self.heads:
            made = head_pools(PREFIX, specs.FULL, layers, self.heads, self.dims, stored, page_size, draft=True)
            return tuple(made)
        return (token_pool(f"{PREFIX}_kv", specs.FULL, layers, (1, self.dims[0]), stored, page_size, draft=True),)


def described(scheduler: Any, configurator: Any) -> Draft:
    """What the draft model that the engine has loaded will create.

    Args:
        scheduler: the engine's scheduler, making its workers.
        configurator: the engine's ``KVCacheConfigurator`` of the target.

    Raises:
        ConfigError: why its pool stays with the engine.
    """
    try:
        runner = engine.draft_runner(scheduler)
        if engine.is_dsv4(runner) or engine.is_dsv4(configurator):
            return _windows(runner, configurator)
        found = [what for what, unknown in engine.unknown_draft(runner).items() if unknown]
        if found:
            raise ConfigError(f"not supported in a draft model: {', '.join(found)}")
        model, layers = runner.model_config, int(runner.layer_info.num_effective_layers)
        if runner.use_mla_backend:
            return Draft(layers, 0, (int(model.kv_lora_rank + model.qk_rope_head_dim), 0), runner.kv_cache_dtype)
        parallel = engine.parallel_of(runner)
        heads = int(model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size))
        v_dim = model.head_dim if model.v_head_dim is None else model.v_head_dim
        return Draft(layers, heads, (int(model.head_dim), int(v_dim)), runner.kv_cache_dtype)
    except (AttributeError, ImportError) as error:
        raise ConfigError(f"this version of the engine is laid out differently ({error})") from error


def _windows(runner: Any, configurator: Any) -> Draft:
    """A draft model of DeepSeek-V4: window layers, each as large as one of the target's."""
    if not (engine.is_dsv4(runner) and engine.is_dsv4(configurator)):
        raise ConfigError("not supported in a draft model: compressed attention in it or in its target, not in both")
    mine, target = (
        (model.qk_nope_head_dim, model.qk_rope_head_dim, model.window_size, found.kv_cache_dtype)
        for found, model in ((runner, runner.model_config), (configurator, configurator.model_config))
    )
    if mine != target:
        raise ConfigError(f"not supported in a draft model: window layers {mine} beside {target}")
    return Draft(int(runner.layer_info.num_effective_layers), 0, mine[:2], mine[3])


class Drafts:
    """The draft model of one process, from its description to its buffers.

    Args:
        runtime: what is elastic in this process.
        starting: how it became so.

    Threads: the scheduler thread.
    """

    def __init__(self, runtime: Runtime, starting: Starting) -> None:
        self._runtime = runtime
        self._starting = starting
        self._building = False
        self._taken = False
        self._pages: buffers.Dsv4Buffers | None = None

    @property
    def building(self) -> bool:
        """Whether the pool that is being made is that of the draft model, and is to be taken over."""
        return self._building

    def sized(self, sizes: Any) -> Any | None:
        """The engine has derived sizes for a draft model: those of the target as they were agreed.

        Args:
            sizes: what the engine derived; the target may have been cut since.

        Returns:
            Sizes that hold the target's ids, or ``None`` where they stay.
        """
        agreed = self._starting
        self._building, self._taken = self._runtime.elastic and agreed.draft is not None, False
        if not self._building or sizes.max_total_num_tokens <= agreed.sizes.max_total_num_tokens:
            return None
        names = type(sizes).__struct_fields__
        return type(sizes)(**{name: getattr(agreed.sizes if name in TOKENS else sizes, name) for name in names})

    def create_heads(self, original: Callable[[Any], None], pool: Any, plain: bool) -> None:
        """``MHATokenToKVPool`` of the draft model, in the native layout or another one."""

        def take() -> None:
            pool.k_buffer, pool.v_buffer = buffers.head_buffers(self._backing(), PREFIX, pool)

        self._create(original, pool, take if plain else None)

    def create_latents(self, original: Callable[[Any], None], pool: Any, plain: bool) -> None:
        """``MLATokenToKVPool`` of the draft model, or one of its variants."""

        def take() -> None:
            pool.kv_buffer = buffers.latent_buffers(self._backing(), pool, f"{PREFIX}_kv")

        self._create(original, pool, take if plain else None)

    def _create(self, original: Callable[[Any], None], pool: Any, take: Callable[[], None] | None) -> None:
        if take is not None and not self._taken:
            try:
                take()
            except ConfigError as error:
                self._stays(str(error))
            else:
                self._taken = True
                return
        original(pool)

    def build_dsv4_pool(self, original: Any, configurator: Any, sizes: dict[str, Any]) -> Any:
        """``DeepSeekV4TokenToKVPool`` of the draft model: its window layers, while the object builds itself."""
        self._pages = buffers.Dsv4Buffers(self._backing(), int(configurator.pool_page_size), draft=True)
        pool = original(configurator, **sizes)
        if self._building:
            try:
                self._pages.finish()
                self._taken = True
            except ConfigError as error:
                self._stays(str(error))
        self._pages = None
        return pool

    def create_page_buffer(self, original: Any, pool: Any, num_pages: int) -> Any:
        """``DeepSeekV4SingleKVPool`` of the draft model: one of its layers."""
        if self._pages is not None:
            try:
                return self._pages.page_buffer(pool, num_pages)
            except ConfigError as error:
                self._stays(str(error))
        return original(pool, num_pages=num_pages)

    def built(self, pools: Any) -> None:
        """The engine has built the pools of a draft model.

        Raises:
            ConfigError: with ``KVCACHED_REQUIRE``, they are not the described ones.
        """
        if self._building and not self._taken:
            self._stays(f"the engine built a {type(pools.token_to_kv_pool).__name__}")
        self._building = False
        self._runtime.draft_built(elastic=self._taken)
        self._starting.reserve(pools, f"{PREFIX}.")

    def _stays(self, why: str) -> None:
        """The engine makes another pool than its draft model promised. Its ids are good in that one as well.

        Layers of DeepSeek-V4 are taken over one by one: those that were taken before stay so.
        """
        self._building = False
        text = f"{why}; described were {self._starting.draft}"
        if self._runtime.config.require:
            raise ConfigError(f"KVCACHED_REQUIRE=1, but the draft pool would stay native: {text}")
        taken = 0 if self._pages is None else self._pages.layers
        _log.warning(
            "event=pool rank=%d name=%s elastic=%s why=%r note='its elastic share is backed with every page; layers"
            " of it that are used: %d of %d'", self._starting.parallel.world.rank, PREFIX, "partly" if taken else "no",
            text, taken, 0 if self._starting.draft is None else self._starting.draft.layers,
        )  # fmt: skip

    def _backing(self) -> Any:
        return self._runtime.started.backing


def beside(side: specs.Side, draft: Draft | None, layers: int) -> specs.Side:
    """The id space of the target with the pools of its draft model behind its own.

    Args:
        side: of the target.
        draft: of the draft model; ``None``: there is none, or it stays with the engine.
        layers: layers of the target.
    """
    return side if draft is None else replace(side, pools=side.pools + draft.pools(layers, side.page_size))

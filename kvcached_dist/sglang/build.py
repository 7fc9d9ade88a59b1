"""The hooks inside the engine's pool building: its buffers become views of reservations where it makes them."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from ..coord.core.errors import ConfigError
from . import buffers, drafts, specs
from .request_states import RequestStates
from .runtime import Phase, Runtime
from .starting import Starting

if TYPE_CHECKING:
    import torch


class Building:
    """Takes the pools of one process over, one family at a time.

    A pool that is not taken over builds itself as ever; :meth:`Starting.bind` then finds that nothing was started, or
    that it stayed beside elastic ones.

    Args:
        runtime: what is elastic in this process.
        starting: how it became so.

    Threads: the scheduler thread.
    """

    def __init__(self, runtime: Runtime, starting: Starting) -> None:
        self._runtime = runtime
        self._starting = starting
        self.drafts = drafts.Drafts(runtime, starting)
        self._next_of_hybrid: list[str] | None = None
        """Prefixes of the pools of a sliding-window hybrid that are still to create their buffers."""
        self.dsv4: buffers.Dsv4Buffers | None = None
        """Set while a DeepSeek-V4 pool creates its buffers."""
        self.request_states: RequestStates | None = None
        """States that are reset when a row is handed out."""

    def _place(self, first_layer: int, end_layer: int, granule_bytes: int) -> specs.Place:
        starting = self._starting
        parallel = starting.parallel
        return specs.Place(
            starting.model_layers, first_layer, end_layer, parallel.pp_rank, parallel.pp_size, parallel.tp_size,
            granule_bytes,
        )  # fmt: skip

    # ------------------------------------------------------------------ heads and latents

    def create_head_buffers(self, original: Any, pool: Any) -> None:
        """``MHATokenToKVPool``: K and V of the native shape; pointers then build natively."""
        runtime = self._runtime
        plain = type(pool).__name__ == "MHATokenToKVPool" and pool.kv_cache_layout == "nhd" and not pool.use_hnd
        if self._next_of_hybrid and runtime.coordinator is not None:
            if not plain:
                raise ConfigError(f"the engine makes a {type(pool).__name__} in layout {pool.kv_cache_layout}")
            prefix = self._next_of_hybrid.pop(0)
            pool.k_buffer, pool.v_buffer = buffers.head_buffers(runtime.coordinator.backing, prefix, pool)
            return
        if self.drafts.building:
            self.drafts.create_heads(original, pool, plain and not pool.enable_custom_mem_pool)
            return
        if runtime.phase is not Phase.AGREED or not plain or pool.enable_custom_mem_pool:
            original(pool)
            return

        def describe(granule_bytes: int) -> specs.Takeover:
            place = self._place(pool.start_layer, pool.start_layer + pool.layer_num, granule_bytes)
            layers = tuple(range(place.layers))
            side = specs.head_side("mha", specs.FULL, layers, specs.HeadPool.of(pool))
            return specs.token_stage([drafts.beside(side, self._starting.draft, place.layers)], place)

        backing = self._starting.start(describe)
        if backing is None:
            original(pool)
            return
        pool.k_buffer, pool.v_buffer = buffers.head_buffers(backing, "mha", pool)

    def create_latent_buffers(self, original: Any, pool: Any) -> None:
        """``MLATokenToKVPool``: one latent per token and layer. Its variants have classes of their own."""
        plain = type(pool).__name__ == "MLATokenToKVPool" and not (pool.use_dsa or pool.enable_custom_mem_pool)
        if self.drafts.building:
            self.drafts.create_latents(original, pool, plain)
            return
        if self._runtime.phase is not Phase.AGREED or not plain:
            original(pool)
            return

        def describe(granule_bytes: int) -> specs.Takeover:
            place = self._place(pool.start_layer, pool.start_layer + pool.layer_num, granule_bytes)
            side = specs.latent_side(tuple(range(place.layers)), pool)
            return specs.token_stage([drafts.beside(side, self._starting.draft, place.layers)], place)

        backing = self._starting.start(describe)
        if backing is None:
            original(pool)
            return
        pool.kv_buffer = buffers.latent_buffers(backing, pool)

    def make_hybrid_pool(self, original: Any, pool: Any, *args: Any, **options: Any) -> None:
        """``SWAKVPool``: both pools inside it are described before the first of them makes a buffer."""
        runtime = self._runtime
        bound = inspect.signature(original).bind(pool, *args, **options)
        bound.apply_defaults()
        chosen = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        if runtime.phase is not Phase.AGREED or type(pool).__name__ != "SWAKVPool" or not _two_plain_pools(chosen):
            original(pool, *args, **options)
            return
        if self._starting.start(lambda granule_bytes: self._hybrid_stage(chosen, granule_bytes)) is None:
            original(pool, *args, **options)
            return
        self._next_of_hybrid = ["mha", "swa"]
        try:
            original(pool, *args, **options)
            if self._next_of_hybrid:
                raise ConfigError(f"the engine did not create {self._next_of_hybrid} where they are taken over")
        finally:
            self._next_of_hybrid = None

    def _hybrid_stage(self, chosen: dict[str, Any], granule_bytes: int) -> specs.Takeover:
        configurator = self._starting.configurator
        info = configurator.layer_info
        place = self._place(info.start_layer, info.end_layer, granule_bytes)
        return specs.hybrid_stage(configurator, chosen, place)

    # ------------------------------------------------------------------ DeepSeek-V4

    def build_dsv4_pool(self, original: Any, configurator: Any, **sizes: Any) -> Any:
        """All pools of DeepSeek-V4 are taken over together, while the engine's pool object builds itself."""
        starting = self._starting
        if self.drafts.building:
            return self.drafts.build_dsv4_pool(original, configurator, sizes)
        if self._runtime.phase is not Phase.AGREED or configurator.is_draft_worker:
            return original(configurator, **sizes)
        slots = int(sizes["req_to_token_pool"].req_to_token.shape[0])

        def describe(_granule_bytes: int) -> specs.Takeover:
            return specs.dsv4_stage(
                configurator,
                full_tokens=int(starting.sizes.full_max_total_num_tokens),
                swa_tokens=int(sizes["swa_max_total_num_tokens"]),
                request_slots=slots,
                draft=starting.draft,
            )

        backing = starting.start(describe)
        if backing is None:
            return original(configurator, **sizes)
        self.dsv4 = buffers.Dsv4Buffers(backing, int(configurator.pool_page_size))
        try:
            pool = original(configurator, **sizes)
            self.dsv4.finish()
        finally:
            self.dsv4 = None
        self.request_states = RequestStates(backing)
        return pool

    def create_page_buffer(self, original: Any, pool: Any, *, num_pages: int) -> Any:
        """``DeepSeekV4SingleKVPool``: one layer of SWA, C4 or C128."""
        if self.drafts.building and type(pool).__name__ == "DeepSeekV4SingleKVPool":
            return self.drafts.create_page_buffer(original, pool, num_pages)
        if self.dsv4 is None or type(pool).__name__ != "DeepSeekV4SingleKVPool":
            return original(pool, num_pages=num_pages)
        return self.dsv4.page_buffer(pool, num_pages)

    def create_indexer_buffers(self, original: Any, pool: Any) -> None:
        """``DeepSeekV4IndexerPool``: the packed indexer. The split one stays with the engine."""
        if self.dsv4 is None or pool.uses_aiter_fp4_layout:
            original(pool)
            return
        pool.index_k_with_scale_buffer = self.dsv4.indexer_buffers(pool)

    def create_state_buffer(
        self, original: Any, pool: Any, *, dtype: torch.dtype, device: str, enable_memory_saver: bool
    ) -> None:
        """``CompressStatePool``: one layer of a compressor state."""
        if self.dsv4 is None:
            original(pool, dtype=dtype, device=device, enable_memory_saver=enable_memory_saver)
            return
        pool.memory_saver_adapter, pool.enable_custom_mem_pool, pool.custom_mem_pool = buffers.no_memory_saver(device)
        pool.kv_score_buffer = buffers.kv_and_score(self.dsv4.state_buffer(pool, dtype))

    def rows_handed_out(self, rows: Any, pool: Any, *_: Any) -> None:
        """``ReqToTokenPool.alloc_rows``: request states of these rows begin empty."""
        if rows:
            self._runtime.handed_out(pool, rows)
        if rows and self.request_states is not None:
            self.request_states.reset(rows, self._starting.forward_stream)


def _two_plain_pools(chosen: dict[str, Any]) -> bool:
    """Whether a hybrid is made of two pools of K and V heads in the native layout."""
    if not {"size", "size_swa", "swa_attention_layer_ids", "full_attention_layer_ids"} <= chosen.keys():
        return False
    heads = importlib.import_module("sglang.srt.mem_cache.memory_pool").MHATokenToKVPool
    classes = [chosen.get(f"{which}_pool_class") for which in ("token_to_kv", "full_kv", "swa_kv")]
    return all(cls in (None, heads) for cls in classes) and not chosen.get("post_capture_active")

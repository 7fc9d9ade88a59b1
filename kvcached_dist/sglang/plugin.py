"""The hooks: where this library sits in the engine, and whether it really does.

The registry of the engine only logs a hook that it could not apply. So every target is looked up before anything is
registered, and looked for again, through the wrappers, before a rank says yes to elastic pools.
"""

from __future__ import annotations

import logging
import pkgutil
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..coord.core.errors import ConfigError
from . import buffers, specs
from .admission import Admission
from .runtime import LIST_ATTRIBUTE, Mark, Phase, Runtime

_log = logging.getLogger("kvcached_dist.sglang")

_SRT = "sglang.srt."
_MEM = f"{_SRT}mem_cache."
_MGR = f"{_SRT}managers."


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook.

    Attributes:
        target: dotted path.
        kind: ``BEFORE``, ``AFTER`` or ``AROUND``, as the engine's registry defines them.
        call: what runs there.
    """

    target: str
    kind: str
    call: Callable[..., Any]


class Plugin:
    """All hooks of one process.

    Args:
        config: settings, read once.
    """

    def __init__(self, config: Config) -> None:
        self.runtime = Runtime(config, self.not_in_force)
        self._dsv4: buffers.Dsv4Buffers | None = None
        self._state_owner: Any = None
        admission = Admission(self.runtime)
        adder = f"{_MGR}schedule_policy.PrefillAdder."
        components, dsv4 = f"{_MGR}scheduler_components.", f"{_MEM}deepseek_v4_memory_pool."
        receiver = f"{components}request_receiver.SchedulerRequestReceiver."
        configurator = f"{_MEM}kv_cache_configurator.KVCacheConfigurator."
        self.hooks: tuple[Hook, ...] = (
            Hook(f"{configurator}_derive_pool_sizes", "AFTER", self._sizes_derived),
            Hook(f"{configurator}_init_pools", "AFTER", self._pools_built),
            Hook(f"{_MEM}memory_pool.MHATokenToKVPool._create_buffers_normal", "AROUND", self._create_mha_buffers),
            Hook(f"{configurator}_build_dsv4_kv_pool", "AROUND", self._build_dsv4_pool),
            Hook(f"{dsv4}DeepSeekV4SingleKVPool.create_buffer", "AROUND", self._create_page_buffer),
            Hook(f"{dsv4}DeepSeekV4IndexerPool._create_buffer", "AROUND", self._create_indexer_buffers),
            Hook(
                f"{_MEM}deepseek_v4_compress_state.CompressStatePool._alloc_kv_score_buffer",
                "AROUND",
                self._create_state_buffer,
            ),
            Hook(f"{_MEM}memory_pool.ReqToTokenPool.clear", "AFTER", self._cleared),
            Hook(f"{_MEM}memory_pool.ReqToTokenPool.alloc_rows", "AFTER", self._rows_handed_out),
            Hook(
                f"{components}invariant_checker.SchedulerInvariantChecker._check_req_pool", "AROUND", self._check_rows
            ),
            Hook(f"{_MEM}allocator.token.TokenToKVPoolAllocator.clear", "AFTER", self._cleared),
            Hook(f"{_MEM}allocator.paged.PagedTokenToKVPoolAllocator.clear", "AFTER", self._cleared),
            Hook(f"{receiver}_broadcast_reqs_across_ranks", "BEFORE", self._about_to_broadcast),
            Hook(f"{_MGR}scheduler.Scheduler.process_input_requests", "BEFORE", self._requests_arrived),
            Hook(f"{_MGR}scheduler.Scheduler.init_model_worker", "AFTER", self._worker_ready),
            Hook(f"{adder}__init__", "AFTER", admission.opened),
            Hook(f"{adder}add_chunked_req", "AROUND", admission.add_chunked_req),
            Hook(f"{adder}add_one_req", "AROUND", admission.add_one_req),
            Hook(f"{adder}add_one_req_ignore_eos", "AROUND", admission.add_one_req_ignore_eos),
            Hook(
                f"{components}pool_stats_observer.SchedulerPoolStatsObserver.get_pool_stats",
                "AFTER",
                self._pool_stats,
            ),
        )

    # ------------------------------------------------------------------ in force?

    def register(self, registry: Any, kinds: Any) -> None:
        """Give the hooks to the engine's registry.

        Args:
            registry: ``HookRegistry``.
            kinds: ``HookType``.
        """
        for hook in self.hooks:
            registry.register(hook.target, hook.call, getattr(kinds, hook.kind))

    def missing(self) -> list[str]:
        """Targets that this version of the engine does not have."""
        return [hook.target for hook in self.hooks if _resolve(hook.target) is None]

    def not_in_force(self) -> list[str]:
        """Targets whose function does not lead to our hook."""
        return [hook.target for hook in self.hooks if not _leads_to(_resolve(hook.target), hook.call)]

    # ------------------------------------------------------------------ building

    def _sizes_derived(self, sizes: Any, configurator: Any, **_: Any) -> Any:
        return self.runtime.agree(configurator, sizes)

    def _create_mha_buffers(self, original: Any, pool: Any) -> None:
        """K and V buffers as views of the reservation, of the native shape; pointers then build natively."""
        runtime = self.runtime
        plain = type(pool).__name__ == "MHATokenToKVPool" and pool.kv_cache_layout == "nhd" and not pool.use_hnd
        if runtime.phase is not Phase.AGREED or not plain or pool.enable_custom_mem_pool:
            original(pool)
            return
        parallel, layers = runtime.parallel, runtime.model_layers

        def describe(granule_bytes: int) -> specs.Takeover:
            geometry = specs.mha_geometry(pool, layers)
            return specs.mha_stage(
                geometry, pp_rank=parallel.pp_rank, pp_size=parallel.pp_size, tp_size=parallel.tp_size,
                granule_bytes=granule_bytes,
            )  # fmt: skip

        if runtime.start(describe) is None or runtime.coordinator is None:
            original(pool)
            return
        pool.k_buffer, pool.v_buffer = buffers.mha_buffers(runtime.coordinator.backing, pool)

    def _build_dsv4_pool(self, original: Any, configurator: Any, **sizes: Any) -> Any:
        """DeepSeek-V4: all pools are taken over together, while the engine's pool object builds itself."""
        runtime = self.runtime
        if runtime.phase is not Phase.AGREED or configurator.is_draft_worker:
            return original(configurator, **sizes)
        slots = int(sizes["req_to_token_pool"].req_to_token.shape[0])

        def describe(_granule_bytes: int) -> specs.Takeover:
            return specs.dsv4_stage(
                configurator,
                full_tokens=int(runtime.sizes.full_max_total_num_tokens),
                swa_tokens=int(sizes["swa_max_total_num_tokens"]),
                request_slots=slots,
            )

        if runtime.start(describe) is None or runtime.coordinator is None:
            return original(configurator, **sizes)
        self._dsv4 = buffers.Dsv4Buffers(runtime.coordinator.backing, int(configurator.pool_page_size))
        try:
            pool = original(configurator, **sizes)
            self._dsv4.finish()
        finally:
            self._dsv4 = None
        self._state_owner = pool
        return pool

    def _create_page_buffer(self, original: Any, pool: Any, *, num_pages: int) -> Any:
        if self._dsv4 is None or type(pool).__name__ != "DeepSeekV4SingleKVPool":
            return original(pool, num_pages=num_pages)
        return self._dsv4.page_buffer(pool, num_pages)

    def _create_indexer_buffers(self, original: Any, pool: Any) -> None:
        if self._dsv4 is None or pool.uses_aiter_fp4_layout:
            original(pool)
            return
        pool.index_k_with_scale_buffer = self._dsv4.indexer_buffers(pool)

    def _create_state_buffer(
        self, original: Any, pool: Any, *, dtype: Any, device: str, enable_memory_saver: bool
    ) -> None:
        if self._dsv4 is None:
            original(pool, dtype=dtype, device=device, enable_memory_saver=enable_memory_saver)
            return
        pool.memory_saver_adapter, pool.enable_custom_mem_pool, pool.custom_mem_pool = buffers.no_memory_saver(device)
        pool.kv_score_buffer = buffers.kv_and_score(self._dsv4.state_buffer(pool, dtype))

    def _rows_handed_out(self, rows: Any, _pool: Any, *_: Any) -> None:
        if rows and self._state_owner is not None:
            buffers.reset_request_states(self._state_owner, rows)

    def _check_rows(self, original: Any, checker: Any) -> None:
        """The engine's check of request rows compares its list with all rows there are."""
        pool = checker.req_to_token_pool
        missing = self.runtime.unpublished_tokens(specs.ROWS) if self.runtime.elastic else 0
        if not missing:
            original(checker)
            return
        free = pool.free_slots
        pool.free_slots = [*free, *range(missing)]
        try:
            original(checker)
        finally:
            pool.free_slots = free

    def _pools_built(self, pools: Any, configurator: Any, **_: Any) -> None:
        if not configurator.is_draft_worker:
            self.runtime.bind(pools)

    def _worker_ready(self, _result: None, scheduler: Any) -> None:
        self.runtime.attach(scheduler)

    def _cleared(self, _result: None, allocator: Any) -> None:
        """The engine's ``clear`` puts every id into the list, backed or not."""
        known = getattr(allocator, LIST_ATTRIBUTE, None)
        if known is not None:
            known.rebuild()

    # ------------------------------------------------------------------ serving

    def _about_to_broadcast(self, receiver: Any, pulled: Any, local: Any = None) -> Any:
        if self.runtime.phase is not Phase.SERVING or pulled is None:
            return None
        mark = self.runtime.decide([*pulled, *(local or ())])
        return None if mark is None else ((receiver, pulled, [*(local or ()), mark]), {})

    def _requests_arrived(self, scheduler: Any, requests: Any) -> Any:
        """Marks first, and out of the list; the list that is handed to the next stage keeps them."""
        if not requests or self.runtime.phase is not Phase.SERVING:
            return None
        marks = [request for request in requests if isinstance(request, Mark)]
        if not marks:
            return None
        for mark in marks:
            self.runtime.apply(mark)
        return (scheduler, [request for request in requests if not isinstance(request, Mark)]), {}

    def _pool_stats(self, stats: Any, _observer: Any) -> None:
        """Ids that are not published are free to the leak check, to usage and to load reports."""
        if not self.runtime.elastic:
            return
        for kind, domain in (("full", specs.FULL), ("swa", specs.SWA)):
            unpublished = self.runtime.unpublished_tokens(domain)
            if not unpublished or getattr(stats, f"{kind}_num_used") is None:
                continue
            used, available = getattr(stats, f"{kind}_num_used"), getattr(stats, f"{kind}_available_size")
            total = used + available + getattr(stats, f"{kind}_evictable_size")
            setattr(stats, f"{kind}_num_used", used - unpublished)
            setattr(stats, f"{kind}_available_size", available + unpublished)
            setattr(stats, f"{kind}_token_usage", (used - unpublished) / total)


def _resolve(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None


def _leads_to(function: Any, call: Callable[..., Any]) -> bool:
    """Whether ``call`` runs somewhere in the chain of wrappers that ``function`` begins."""
    while function is not None:
        closure: Sequence[types.CellType] = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents == call for cell in closure if _filled(cell)):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def register() -> None:
    """Read the settings and register the hooks.

    Raises:
        SystemExit: with ``KVCACHED_REQUIRE``, a setting is unusable or a target is missing.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        config = Config.from_env()
    except ConfigError as error:
        raise SystemExit(f"kvcached_dist: {error}") from error
    if not config.autopatch:
        _log.warning("event=plugin elastic=no why='KVCACHED_AUTOPATCH is off'")
        return
    plugin = Plugin(config)
    missing = plugin.missing()
    if missing:
        text = f"this version of SGLang has no {', '.join(missing)}"
        if config.require:
            raise SystemExit(f"kvcached_dist: KVCACHED_REQUIRE=1, but {text}")
        _log.warning("event=plugin elastic=no why=%r", text)
        return
    plugin.register(HookRegistry, HookType)

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
from . import features, specs
from .admission import Admission
from .build import Building
from .engine import check_cache, close_sessions
from .eviction import Evictions
from .offload import Offload
from .runtime import LIST_ATTRIBUTE, Mark, Phase, Runtime
from .starting import Starting

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
        self.runtime = Runtime(config)
        self.starting = Starting(self.runtime, self.not_in_force)
        self.building = building = Building(self.runtime, self.starting)
        admission, offload = Admission(self.runtime), Offload(self.runtime)
        self._evictions = evictions = Evictions(self.runtime)
        adder = f"{_MGR}schedule_policy.PrefillAdder."
        components, dsv4 = f"{_MGR}scheduler_components.", f"{_MEM}deepseek_v4_memory_pool."
        front = f"{_MGR}tokenizer_control_mixin.TokenizerControlMixin."
        updater = f"{components}weight_updater.SchedulerWeightUpdaterManager."
        receiver = f"{components}request_receiver.SchedulerRequestReceiver."
        configurator = f"{_MEM}kv_cache_configurator.KVCacheConfigurator."
        self.hooks: tuple[Hook, ...] = (
            Hook(f"{configurator}_derive_pool_sizes", "AFTER", self._sizes_derived),
            Hook(f"{configurator}_init_pools", "AFTER", self._pools_built),
            Hook(f"{_MEM}memory_pool.MHATokenToKVPool._create_buffers_normal", "AROUND", building.create_head_buffers),
            Hook(f"{_MEM}memory_pool.MLATokenToKVPool._create_buffers", "AROUND", building.create_latent_buffers),
            Hook(f"{_MEM}swa_memory_pool.SWAKVPool.__init__", "AROUND", building.make_hybrid_pool),
            Hook(f"{configurator}_build_dsv4_kv_pool", "AROUND", building.build_dsv4_pool),
            Hook(f"{dsv4}DeepSeekV4SingleKVPool.create_buffer", "AROUND", building.create_page_buffer),
            Hook(f"{dsv4}DeepSeekV4IndexerPool._create_buffer", "AROUND", building.create_indexer_buffers),
            Hook(
                f"{_MEM}deepseek_v4_compress_state.CompressStatePool._alloc_kv_score_buffer",
                "AROUND",
                building.create_state_buffer,
            ),
            Hook(f"{_MEM}memory_pool.ReqToTokenPool.clear", "AFTER", self._cleared),
            Hook(f"{_MEM}memory_pool.ReqToTokenPool.alloc_rows", "AFTER", building.rows_handed_out),
            Hook(
                f"{components}invariant_checker.SchedulerInvariantChecker._check_req_pool", "AROUND", self._check_rows
            ),
            Hook(f"{_MEM}allocator.token.TokenToKVPoolAllocator.clear", "AFTER", self._cleared),
            Hook(f"{_MEM}allocator.paged.PagedTokenToKVPoolAllocator.clear", "AFTER", self._cleared),
            Hook(f"{_MEM}allocator.token.TokenToKVPoolAllocator.free", "AROUND", self._free_tokens),
            Hook(f"{_MEM}allocator.paged.PagedTokenToKVPoolAllocator._release_page_ids", "AROUND", self._free_pages),
            Hook(f"{_MEM}memory_pool.ReqToTokenPool.free_rows", "AROUND", self._free_rows),
            Hook(f"{_MEM}unified_radix_cache.UnifiedRadixCache._evict", "AROUND", evictions.evict),
            Hook(
                f"{_MEM}unified_radix_cache.UnifiedRadixCache._component_available_size", "AFTER", evictions.available
            ),
            Hook(f"{receiver}_split_work_and_control_reqs", "AFTER", self._split),
            Hook(f"{receiver}_broadcast_reqs_across_ranks", "BEFORE", self._about_to_broadcast),
            Hook(f"{_MGR}scheduler.Scheduler.process_input_requests", "BEFORE", self._requests_arrived),
            Hook(f"{_MGR}scheduler.Scheduler._add_request_to_queue", "AFTER", self._queued),
            Hook(f"{_MGR}scheduler.Scheduler.init_model_worker", "BEFORE", self._worker_starts),
            Hook(f"{_MGR}scheduler.Scheduler.init_model_worker", "AFTER", self._worker_ready),
            Hook(f"{_MGR}scheduler.Scheduler.__init__", "AFTER", self._scheduler_made),
            Hook(f"{front}release_memory_occupation", "AROUND", offload.ask_release),
            Hook(f"{front}resume_memory_occupation", "AROUND", offload.ask_resume),
            Hook(f"{updater}release_memory_occupation", "AROUND", offload.release),
            Hook(f"{updater}resume_memory_occupation", "AROUND", offload.resume),
            Hook(f"{_MGR}scheduler.Scheduler.get_internal_state", "AFTER", offload.tell_state),
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
        """Targets, and names that the hooks use, which this version of the engine does not have."""
        return [*(hook.target for hook in self.hooks if _resolve(hook.target) is None), *features.missing()]

    def not_in_force(self) -> list[str]:
        """Targets whose function does not lead to our hook."""
        return [hook.target for hook in self.hooks if not _leads_to(_resolve(hook.target), hook.call)]

    # ------------------------------------------------------------------ building

    def _sizes_derived(self, sizes: Any, configurator: Any, **_: Any) -> Any:
        if configurator.is_draft_worker:
            return self.building.drafts.sized(sizes)
        return self.starting.agree(configurator, sizes)

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
        if configurator.is_draft_worker:
            self.building.drafts.built(pools)
        else:
            self.starting.bind(pools)

    def _worker_starts(self, scheduler: Any) -> None:
        self.starting.worker_starts(scheduler)

    def _worker_ready(self, _result: None, scheduler: Any) -> None:
        self.starting.attach(scheduler)

    def _scheduler_made(self, _result: None, scheduler: Any, *_: Any, **__: Any) -> None:
        # Its prefix cache is made after its worker; the first step asks it already.
        if self.runtime.phase is Phase.SERVING:
            check_cache(scheduler.tree_cache)

    def _cleared(self, _result: None, allocator: Any) -> None:
        """The engine's ``clear`` puts every id into the list, backed or not."""
        known = getattr(allocator, LIST_ATTRIBUTE, None)
        if known is not None:
            known.rebuild()

    # ------------------------------------------------------------------ what enters a free list

    def _free_tokens(self, original: Any, allocator: Any, free_index: Any) -> None:
        # What waits in a free group comes here again when the group ends.
        if allocator.free_group is None:
            self._evictions.free(original, allocator, (free_index,))
        else:
            original(allocator, free_index)

    def _free_pages(self, original: Any, allocator: Any, *page_ids: Any) -> None:
        # Pages that are not sorted while they are allocated are given again first.
        self._evictions.free(original, allocator, page_ids, in_front=not allocator.need_sort)

    def _free_rows(self, original: Any, pool: Any, indices: Any) -> None:
        original(pool, self.runtime.admit(pool, indices))

    # ------------------------------------------------------------------ serving

    def _about_to_broadcast(self, receiver: Any, pulled: Any, local: Any = None) -> Any:
        if self.runtime.phase is not Phase.SERVING or pulled is None:
            return None
        ours = self.runtime.to_broadcast([*pulled, *(local or ())])
        return ((receiver, pulled, [*(local or ()), *ours]), {}) if ours else None

    def _split(self, kinds: Any, _receiver: Any, _requests: Any) -> Any:
        """With DP attention marks are work: the control channel is that of all groups, and begins at one of them."""
        work, control = kinds
        if not any(isinstance(request, Mark) for request in control):
            return None
        marks = [request for request in control if isinstance(request, Mark)]
        return [*work, *marks], [request for request in control if not isinstance(request, Mark)]

    def _requests_arrived(self, scheduler: Any, requests: Any) -> Any:
        """Marks first, and out of the list; the list that is handed to the next stage keeps them."""
        if self.runtime.phase is not Phase.SERVING:
            return None
        marks = [request for request in requests or () if isinstance(request, Mark)]
        for mark in marks:
            self.runtime.apply(mark)
        # Behind the marks: rank 0 has made them before it gets here.
        close_sessions(scheduler.session_controller)
        if not marks:
            return None
        return (scheduler, [request for request in requests if not isinstance(request, Mark)]), {}

    def _queued(self, _result: None, _scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
        self.runtime.queued(request)

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

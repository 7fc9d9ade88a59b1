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
        admission = Admission(self.runtime)
        adder = f"{_MGR}schedule_policy.PrefillAdder."
        receiver = f"{_MGR}scheduler_components.request_receiver.SchedulerRequestReceiver."
        configurator = f"{_MEM}kv_cache_configurator.KVCacheConfigurator."
        self.hooks = (
            Hook(f"{configurator}_derive_pool_sizes", "AFTER", self._sizes_derived),
            Hook(f"{configurator}_init_pools", "AFTER", self._pools_built),
            Hook(f"{_MEM}memory_pool.MHATokenToKVPool._create_buffers_normal", "AROUND", self._create_mha_buffers),
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
                f"{_MGR}scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver.get_pool_stats",
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
        stage = runtime.start(pool)
        if stage is None or runtime.coordinator is None:
            original(pool)
            return
        backing = runtime.coordinator.backing
        k_shape, v_shape = pool._kv_buffer_shapes()
        dtype = str(pool.store_dtype).removeprefix("torch.")
        if len(stage.pools) == 1:
            name, layers = stage.pools[0].name, range(pool.layer_num)
            pool.k_buffer = [backing.layer(name, 2 * layer, dtype, k_shape) for layer in layers]
            pool.v_buffer = [backing.layer(name, 2 * layer + 1, dtype, v_shape) for layer in layers]
        else:
            k, v = (part.name for part in stage.pools)
            pool.k_buffer = [backing.layer(k, layer, dtype, k_shape) for layer in range(pool.layer_num)]
            pool.v_buffer = [backing.layer(v, layer, dtype, v_shape) for layer in range(pool.layer_num)]

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
        unpublished = self.runtime.unpublished_tokens() if self.runtime.elastic else 0
        if not unpublished:
            return
        total = stats.full_num_used + stats.full_available_size + stats.full_evictable_size
        stats.full_num_used -= unpublished
        stats.full_available_size += unpublished
        stats.full_token_usage = stats.full_num_used / total


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

"""What this plugin relies on in the engine besides the functions that it hooks.

Versions of the engine are told apart by what they have, never by their number. A hook may be in place and still mean
nothing: what it reads or writes has moved. So the names that have moved between versions are looked for in the code
itself, before anything is registered; one that is missing keeps the native pools and is named.
"""

from __future__ import annotations

import inspect
import pkgutil
import types
from dataclasses import dataclass
from typing import Any

_SRT = "sglang.srt."
_BUDGET = f"{_SRT}mem_cache.prefill_budget.PrefillBudget"


@dataclass(frozen=True, slots=True)
class Use:
    """A name that is used in a place of the engine.

    Attributes:
        place: dotted path of a module, class or function.
        name: an attribute, field, parameter, or a name in the function's code (of a class: of its ``__init__``).
        instead: where the same is found in other versions.
    """

    place: str
    name: str
    instead: tuple[str, str] | None = None

    def __str__(self) -> str:
        return f"{self.place}: {self.name}"


USES = (
    Use(f"{_SRT}distributed.parallel_state", "get_world_group"),
    Use(f"{_SRT}mem_cache.kv_cache_configurator", "is_deepseek_v4"),
    Use(f"{_SRT}mem_cache.kv_cache_configurator.KVCacheConfigurator", "ps",
        (f"{_SRT}runtime_context.ParallelContext", "attn_tp_size")),
    Use(f"{_SRT}mem_cache.kv_cache_configurator.KVCacheConfigurator", "pool_page_size"),
    Use(f"{_SRT}mem_cache.kv_cache_configurator.KVCacheConfigurator", "layer_info"),
    Use(f"{_SRT}configs.model_config", "get_hybrid_layer_ids"),
    Use(f"{_SRT}mem_cache.memory_pool.MLATokenToKVPool", "kv_cache_dim"),
    Use(f"{_SRT}mem_cache.base_prefix_cache", "EvictParams"),
    Use(f"{_SRT}managers.schedule_policy.PrefillAdder", "rem_total_token_offset", (_BUDGET, "total_offset")),
    Use(f"{_SRT}managers.schedule_policy.PrefillAdder", "cur_rem_token_offset", (_BUDGET, "current_offset")),
    Use(f"{_SRT}managers.schedule_policy.PrefillAdder", "rem_swa_token_offset", (_BUDGET, "swa_offset")),
    Use(f"{_SRT}managers.schedule_policy.PrefillAdder", "rem_chunk_tokens"),
    Use(f"{_SRT}managers.schedule_policy.PrefillAdder", "_lock_node"),
    Use(f"{_SRT}managers.schedule_batch.Req", "prefix_indices", (f"{_SRT}managers.schedule_batch.Req", "prefix_len")),
    Use(f"{_SRT}managers.scheduler_components.request_receiver.SchedulerRequestReceiver._broadcast_reqs_across_ranks",
        "local_reqs"),
    Use(f"{_SRT}managers.io_struct.AbortReq", "abort_message"),
    Use(f"{_SRT}session.session_controller.SessionController", "maybe_reap"),
    Use(f"{_SRT}session.session_controller.SessionController", "sessions"),
    Use(f"{_SRT}session.session_controller.Session", "close_on_finish"),
    Use(f"{_SRT}session.session_controller.Session", "_inflight"),
    Use(f"{_SRT}mem_cache.memory_pool.ReqToTokenPool", "free_slots"),
    Use(f"{_SRT}mem_cache.memory_pool.ReqToTokenPool", "req_to_token"),
)  # fmt: skip


def missing() -> list[str]:
    """What this version of the engine does not have, as ``place: name``."""
    return [str(use) for use in USES if not has(use)]


def has(use: Use) -> bool:
    """Whether the name is used, or to be found, in its place or in the other one."""
    return _found(use.place, use.name) or (use.instead is not None and _found(*use.instead))


def _found(path: str, name: str) -> bool:
    try:
        place = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return hasattr(place, name) or name in _names(place)


def _names(place: Any) -> set[str]:
    found: set[str] = set()
    if inspect.isclass(place):
        for owner in place.__mro__:
            found |= set(vars(owner).get("__annotations__", ()))
        place = place.__init__
    function = inspect.unwrap(place)
    if isinstance(function, types.FunctionType):
        found |= {*function.__code__.co_names, *function.__code__.co_varnames}
    return found

"""The few things that are asked of SGLang itself, in one place.

Whatever may be missing in another version is looked up by name when it is needed; a missing name is an
``AttributeError`` or ``ImportError`` that :func:`refusal` turns into a reason.
"""

from __future__ import annotations

import importlib
import pickle
import secrets
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..coord.core.errors import ConfigError, WaitTimeout
from ..coord.core.types import Rank
from ..coord.links.bounded import StoreConnections
from ..coord.links.store import StartBarrier
from ..world import World

if TYPE_CHECKING:
    from ..coord.links.bounded import Store


SCALED_TYPES = ("mxfp8", "nvfp4", "fp4_mx_block16")
"""Element types of the engine's KV cache whose scales are buffers of their own."""


def context(name: str) -> Any:
    """One group of the engine's resolved settings, such as ``memory`` or ``schedule``."""
    return getattr(importlib.import_module("sglang.srt.runtime_context"), f"get_{name}")()


def world_group() -> Any:
    """The engine's group of all ranks."""
    return importlib.import_module("sglang.srt.distributed.parallel_state").get_world_group()


def parallel_of(configurator: Any) -> Any:
    """Sizes and ranks of the engine, kept by its ``KVCacheConfigurator`` or, later, for the whole process."""
    kept = getattr(configurator, "ps", None)
    return context("parallel") if kept is None else kept


def prefix_tokens(request: Any) -> int:
    """Tokens of a request that the prefix cache has, as an attribute or, before, as a list of their ids."""
    length = getattr(request, "prefix_len", None)
    return len(request.prefix_indices) if length is None else int(length)


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that share one queue of requests and so one set of block ids: they have one coordinator.

    That is the whole world, or with DP attention the ranks of one data-parallel rank in all stages.

    Attributes:
        tp_rank: place of this rank in its stage of the group.
        tp_size: ranks of a stage.
        pp_rank: its stage.
        pp_size: stages.
        dp_rank: which of the groups this is.
        dp_size: groups.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int

    @property
    def world(self) -> World:
        """Who this rank is for the coordinator of the group."""
        return World(self.pp_rank * self.tp_size + self.tp_rank, self.tp_size, self.pp_size)

    @property
    def first(self) -> int:
        """The group's first rank in the engine's world."""
        return self.dp_rank * self.tp_size

    def name(self, engine: str) -> str:
        """Name of the group for tools, where the operator named the engine."""
        return f"{engine}-dp{self.dp_rank}" if engine and self.dp_size > 1 else engine


def group_of(parallel: Any) -> Group:
    """This rank's group, from the engine's sizes and ranks."""
    copies = int(parallel.attn_dp_size)
    if copies == 1:
        return Group(parallel.tp_rank, parallel.tp_size, parallel.pp_rank, parallel.pp_size, 0, 1)
    return Group(
        parallel.attn_tp_rank, parallel.attn_tp_size, parallel.pp_rank, parallel.pp_size, parallel.attn_dp_rank, copies
    )


def world_rank() -> int:
    """This rank in the engine's world; 0 in a process without one."""
    return int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else 0


def default_store() -> Store:
    """The store through which the engine's ranks have found one another."""
    return cast("Store", torch.distributed.distributed_c10d._get_default_store())


def gather(value: object, item: str, timeout_s: float) -> list[Any]:
    """What every rank of the engine says, in rank order, all groups. Collective, only while the engine starts.

    Goes through the store of the engine's processes and not through one of their groups: where this plugin is not
    registered on some rank, a collective would wait without end or be paired with one of the engine's own.

    Args:
        value: what this rank says; is pickled.
        item: what is exchanged: each name once in the life of an engine, in the same order on all ranks.
        timeout_s: longest wait for the other ranks, in seconds.

    Raises:
        WaitTimeout: names the ranks that said nothing, and what to look at there.
        StoreLost: the server of the store is gone.

    Blocks: at most ``timeout_s`` and a grace of half a second.
    """
    group = world_group()
    if group.world_size == 1:
        return [value]
    connections, installed = StoreConnections(default_store()), version("kvcached_dist")
    # Ranks with another version of this library do not see one another: what is exchanged may differ.
    barrier = StartBarrier(connections, f"sglang-{installed}", Rank(group.rank_in_group), group.world_size)
    try:
        barrier.put(item, pickle.dumps(value), timeout_s)
        said = barrier.gather(item, timeout_s)
    except WaitTimeout as error:
        raise WaitTimeout(
            error.who,
            f"its word on {item!r} while elastic pools start. Look in its log for event=plugin and for errors;"
            f" ENABLE_KVCACHED and the other settings must be the same on every node, and kvcached_dist {installed}"
            " must be installed there beside the same engine. A slow start needs a larger"
            " KVCACHED_DIST_START_TIMEOUT_S",
            error.seconds,
        ) from error
    finally:
        connections.close()
    return [pickle.loads(said[Rank(rank)]) for rank in range(group.world_size)]


def open_store(host: str, group: Group, timeout_s: float) -> tuple[Store | None, str]:
    """A store that all ranks of a group can reach, and the name of this run of it.

    Collective over all groups, only while the engine starts.

    Args:
        host: address of this rank, should it keep the store.
        group: the group.
        timeout_s: longest wait for the other ranks, in seconds.

    Raises:
        WaitTimeout, StoreLost: as :func:`gather`.
    """
    store: Any = None
    offer: tuple[str, int, str] | None = None
    if group.world.rank == 0:
        if group.world.size > 1:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        offer = host, 0 if store is None else store.port, secrets.token_hex(8)
    host, port, session = gather(offer, "store", timeout_s)[group.first]
    if store is None and group.world.size > 1:
        store = TCPStore(host, port, is_master=False)
    return cast("Store | None", store), str(session)


def store_host(server_args: Any) -> str:
    """Address under which the other ranks reach this one."""
    if getattr(server_args, "nnodes", 1) == 1:
        return "127.0.0.1"
    return str(importlib.import_module("sglang.srt.utils").get_local_ip_auto())


def is_dsv4(configurator: Any) -> bool:
    """Whether the engine is about to build DeepSeek-V4 pools."""
    module = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    return bool(module.is_deepseek_v4(configurator.model_config.hf_config))


def _other_dsv4_layout() -> bool:
    gates = importlib.import_module("sglang.kernels.ops.attention.dsv4.unified_kv_kernels.env_gate")
    return bool(gates.is_unified_kv_triton()) or context("exec").kernel.dsv4_attn_backend == "trtllm"


def refusal(configurator: Any, *, dsv4_bridge: bool) -> str | None:
    """Why the pools that the engine is about to size stay native; ``None``: they can be elastic.

    Args:
        configurator: the engine's ``KVCacheConfigurator``.
        dsv4_bridge: DeepSeek-V4 pools are to be taken over.
    """
    try:
        return _refusal(configurator, is_dsv4(configurator), dsv4_bridge)
    except (AttributeError, ImportError) as error:
        return f"this version of the engine is laid out differently ({error})"


def unknown_families(configurator: Any) -> dict[str, bool]:
    """Pools of ordinary models whose layout is not in the catalogue."""
    module = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    model = configurator.model_config
    latent, hybrid = bool(configurator.use_mla_backend), bool(configurator.is_hybrid_swa)
    stored = configurator.kv_cache_dtype_str
    return {
        "MLA with a sparse-attention indexer (DSA)": latent and bool(module.is_deepseek_dsa(model.hf_config)),
        "MLA with sliding-window layers": latent and hybrid,
        "sliding-window layers only": hybrid and not latent and not model.full_attention_layer_ids,
        "the sparse attention of MiniMax": bool(module.is_minimax_sparse(model.hf_config)),
        f"KV of type {stored} (it keeps scales beside the rows)": stored in SCALED_TYPES
        or bool(module.is_float4_e2m1fn_x2(configurator.kv_cache_dtype)),
    }


def draft_runner(scheduler: Any) -> Any:
    """The engine's ``ModelRunner`` of the draft model: loaded, without pools.

    Raises:
        ConfigError: there is none in this process, or there are several.
    """
    worker = getattr(scheduler, "draft_worker", None)
    runners = () if worker is None else tuple(worker._draft_model_runners())
    if len(runners) != 1:
        raise ConfigError(f"there are {len(runners)} draft models in this process when its pools are made, not one")
    return runners[0]


def unknown_draft(runner: Any) -> dict[str, bool]:
    """What keeps the pool of a draft model with the engine.

    Args:
        runner: its ``ModelRunner``.
    """
    module = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    model = runner.model_config
    return {
        **unknown_families(runner),
        "sliding windows": bool(runner.is_hybrid_swa),
        "recurrent state": module.mambaish_config(model) is not None,
    }


CHAIN_ALGORITHMS = ("STANDALONE", "EAGLE", "EAGLE3")
"""Speculative decoding whose draft pools are indexed by the target's own ids and that allocates ahead of a step."""


def _drafts_in_a_chain(configurator: Any, dsv4: bool) -> bool:
    """Whether drafts follow one another, in a model whose draft has the ids of full attention, or in DeepSeek-V4."""
    spec = context("spec")
    return (
        spec.speculative_algorithm in CHAIN_ALGORITHMS
        and (spec.speculative_eagle_topk or 1) == 1
        and (dsv4 or not configurator.is_hybrid_swa)
    )


def draft_tokens() -> int:
    """Most draft tokens that a step verifies; 0 without speculative decoding."""
    if context("spec").speculative_algorithm is None:
        return 0
    most = importlib.import_module("sglang.srt.runtime_context").max_speculative_num_draft_tokens()
    return int(most or 0)


def pages_per_decode(page_size: int) -> int:
    """Most token pages that one running request takes in a decode step: draft tokens are allocated ahead.

    Args:
        page_size: tokens of a page.
    """
    if context("spec").speculative_algorithm is None:
        return 1
    sizing = importlib.import_module("sglang.srt.mem_cache.allocation_sizing")
    # Rounded up to whole pages from wherever the request ends.
    return -(-(int(sizing.get_alloc_reserve_per_decode()) + page_size - 1) // page_size)


def _unserved_dp_attention(configurator: Any, dsv4: bool) -> dict[str, bool]:
    """Ways of DP attention that no real engine has been served with."""
    local_control = context("parallel").enable_dp_attention_local_control_broadcast
    return {
        "DP attention with pipeline stages": parallel_of(configurator).pp_size > 1,
        "DP attention with speculative decoding": not configurator.spec_algorithm.is_none(),
        "DP attention of DeepSeek-V4": dsv4,
        "DP attention with sliding-window layers": bool(configurator.is_hybrid_swa),
        "DP attention with control requests broadcast in each group": bool(local_control),
    }


def _unserved_caches(memory: Any) -> dict[str, bool]:
    """Prefix caches that no real engine has been served with; a version without one does not have its setting."""
    registered = getattr(memory, "radix_cache_backend", None)
    switches = importlib.import_module("sglang.srt.environ").envs
    tree_in_cpp = getattr(switches, "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", None)
    return {
        "LMCache": bool(getattr(memory, "enable_lmcache", False)),
        "FlexKV": bool(getattr(memory, "enable_flexkv", False)),
        f"the prefix cache of --radix-cache-backend {registered}": bool(registered),
        "the radix tree in C++": tree_in_cpp is not None and bool(tree_in_cpp.get()),
    }


def _refusal(configurator: Any, dsv4: bool, dsv4_bridge: bool) -> str | None:
    parallel = parallel_of(configurator)
    memory, schedule = context("memory"), context("schedule")
    unsupported = {
        "several data-parallel replicas": parallel.dp_size > 1 and parallel.attn_dp_size == 1,
        **(_unserved_dp_attention(configurator, dsv4) if parallel.attn_dp_size > 1 else {}),
        "context-parallel attention": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "speculative decoding of this kind": not configurator.spec_algorithm.is_none()
        and not _drafts_in_a_chain(configurator, dsv4),
        "disaggregated prefill or decode": context("disagg").disaggregation_mode != "null",
        "unified memory": memory.enable_unified_memory,
        "HiSparse": memory.enable_hisparse,
        "the hierarchical cache": memory.enable_hierarchical_cache,
        "an external cache": memory.enable_unified_cache_external_linker,
        **_unserved_caches(memory),
        "the page-major layout": memory.enable_page_major_kv_layout,
        "the memory saver (release_memory_occupation)": context("exec").features.enable_memory_saver,
        "KV sizing after graph capture": configurator.post_capture_kv_active,
        "recurrent state": configurator.mambaish_config is not None,
        **({} if dsv4 else unknown_families(configurator)),
        "DeepSeek-V4 (KVCACHED_SGLANG_DSV4_KV_POOL_BRIDGE is off)": dsv4 and not dsv4_bridge,
        "the unified or uniform layouts of DeepSeek-V4": dsv4 and _other_dsv4_layout(),
        "prefill without a KV cache": schedule.prefill_only_disable_kv_cache,
        "diffusion models": getattr(configurator.server_args, "dllm_algorithm", None) is not None,
        f"device {configurator.device}": configurator.device not in ("cpu", "cuda"),
    }
    reasons = [what for what, found in unsupported.items() if found]
    return f"not supported: {', '.join(reasons)}" if reasons else None


def check_cache(tree_cache: Any) -> None:
    """See that the prefix cache tells what is asked of it in every step.

    Raises:
        ConfigError: it does not.
    """
    try:
        int(tree_cache.evictable_size())
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"the engine's prefix cache is a {type(tree_cache).__name__}, which does not tell how many tokens it could"
            f" evict (evictable_size(): {type(error).__name__} {error}): choose another prefix cache, or start without"
            " ENABLE_KVCACHED"
        ) from error


def evict(tree_cache: Any, tokens: int) -> int:
    """Evict least recently used tokens of the prefix cache; how many went."""
    if not tokens:
        return 0  # a mark to compact at
    params = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache").EvictParams
    before = int(tree_cache.evictable_size())
    tree_cache.evict(params(num_tokens=tokens))
    return before - int(tree_cache.evictable_size())


def close_sessions(controller: Any) -> None:
    """Close the sessions that were told to close while a request of theirs ran, once that has ended.

    The engine does so within a second, by each rank's own clock, and until then the ranks' free lists differ. Requests
    end in the same step on all ranks, so what is called in every step closes them in the same one. Sessions that have
    timed out by this rank's clock go with them, as they would within a second.

    Args:
        controller: the engine's ``SessionController``.
    """
    if any(session.close_on_finish and not session._inflight for session in controller.sessions.values()):
        controller.maybe_reap(time.monotonic(), interval=-1.0)

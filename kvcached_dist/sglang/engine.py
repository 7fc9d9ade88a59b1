"""The few things that are asked of SGLang itself, in one place.

Whatever may be missing in another version is looked up by name when it is needed; a missing name is an
``AttributeError`` or ``ImportError`` that :func:`refusal` turns into a reason.
"""

from __future__ import annotations

import importlib
import secrets
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

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
    return importlib.import_module("sglang.srt.distributed").get_world_group()


def world_of(parallel: Any) -> World:
    """Who this rank is, from the engine's ``ParallelState``."""
    return World(parallel.pp_rank * parallel.tp_size + parallel.tp_rank, parallel.tp_size, parallel.pp_size)


def gather(value: object) -> list[Any]:
    """What every rank says, in rank order. Collective, only while the engine starts."""
    group = world_group()
    if group.world_size == 1:
        return [value]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def open_store(host: str) -> tuple[Store | None, str]:
    """A store that all ranks can reach, and the name of this run. Collective, only while the engine starts."""
    group = world_group()
    if group.world_size == 1:
        return None, secrets.token_hex(8)
    store: Any = None
    offer: list[Any] = [None, 0, ""]
    if group.rank_in_group == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        offer = [host, store.port, secrets.token_hex(8)]
    torch.distributed.broadcast_object_list(offer, src=group.ranks[0], group=group.cpu_group)
    if store is None:
        store = TCPStore(offer[0], offer[1], is_master=False)
    return cast("Store", store), str(offer[2])


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


def _unknown_families(configurator: Any) -> dict[str, bool]:
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


def _refusal(configurator: Any, dsv4: bool, dsv4_bridge: bool) -> str | None:
    parallel = configurator.ps
    memory, schedule = context("memory"), context("schedule")
    unsupported = {
        "several data-parallel ranks (one group each is not implemented)": max(parallel.dp_size, parallel.attn_dp_size)
        > 1,
        "context-parallel attention": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "speculative decoding": not configurator.spec_algorithm.is_none(),
        "disaggregated prefill or decode": context("disagg").disaggregation_mode != "null",
        "unified memory": memory.enable_unified_memory,
        "HiSparse": memory.enable_hisparse,
        "the hierarchical cache": memory.enable_hierarchical_cache,
        "an external cache": memory.enable_unified_cache_external_linker,
        "the page-major layout": memory.enable_page_major_kv_layout,
        "the memory saver (release_memory_occupation)": context("exec").features.enable_memory_saver,
        "KV sizing after graph capture": configurator.post_capture_kv_active,
        "recurrent state": configurator.mambaish_config is not None,
        **({} if dsv4 else _unknown_families(configurator)),
        "DeepSeek-V4 (KVCACHED_SGLANG_DSV4_KV_POOL_BRIDGE is off)": dsv4 and not dsv4_bridge,
        "the unified or uniform layouts of DeepSeek-V4": dsv4 and _other_dsv4_layout(),
        "prefill without a KV cache": schedule.prefill_only_disable_kv_cache,
        "diffusion models": getattr(configurator.server_args, "dllm_algorithm", None) is not None,
        f"device {configurator.device}": configurator.device not in ("cpu", "cuda"),
    }
    reasons = [what for what, found in unsupported.items() if found]
    return f"not supported: {', '.join(reasons)}" if reasons else None


def evict(tree_cache: Any, tokens: int) -> int:
    """Evict least recently used tokens of the prefix cache; how many went."""
    params = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache").EvictParams
    before = int(tree_cache.evictable_size())
    tree_cache.evict(params(num_tokens=tokens))
    return before - int(tree_cache.evictable_size())

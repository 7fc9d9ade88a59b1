"""One rank with the engine's own pools, allocators and request rows over elastic memory, without a scheduler loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from kvcached_dist.config import Config
from kvcached_dist.coord.core.entries import Entry
from kvcached_dist.sglang import engine
from kvcached_dist.sglang.plugin import Plugin
from kvcached_dist.sglang.runtime import Phase

GRANULE = 4096
CAPACITY = 16 << 20


def configurator(**changes: Any) -> Any:
    """As much of the engine's ``KVCacheConfigurator`` as is asked while pools are built."""
    parallel = SimpleNamespace(pp_rank=0, pp_size=1, tp_rank=0, tp_size=1, attn_dp_size=1)
    values: dict[str, Any] = {
        "ps": parallel, "device": "cpu", "is_draft_worker": False, "server_args": SimpleNamespace(nnodes=1),
        "layer_info": SimpleNamespace(start_layer=0, end_layer=4), "sliding_window_size": None,
        "model_config": SimpleNamespace(num_hidden_layers=4),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


class Rank:
    """Plugin, pools and coordinator of one process.

    Args:
        registry: the engine's hook registry.
        patch: pytest's ``monkeypatch``.
        made_by: what the engine's ``KVCacheConfigurator`` would be.
        settings: of this library.
    """

    def __init__(self, registry: Any, patch: Any, made_by: Any, **settings: Any) -> None:
        from sglang.srt.plugins.hook_registry import HookType

        patch.setattr(engine, "world_group", lambda: SimpleNamespace(world_size=1))
        sizes = {"host_granule_bytes": GRANULE, "host_capacity_bytes": CAPACITY}
        few = {"min_reserved_pages": 1, "max_reserved_pages": 2, "lease_s": 30.0}
        self.plugin = Plugin(Config.preset("tests", **sizes, **few, **settings))
        self.plugin.register(registry, HookType)
        registry.apply_hooks()
        self.runtime = self.plugin.runtime
        self.runtime.phase = Phase.AGREED
        self.plugin.starting.configurator = made_by

    def build(self, make_pool: Callable[[], Any], make_allocator: Callable[[Any, Any], Any]) -> None:
        """What ``_init_pools`` of the engine does: request rows, buffers, allocator."""
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        self.rows = ReqToTokenPool(size=8, max_context_len=512, device="cpu", enable_memory_saver=False)
        self.pool = make_pool()
        self.allocator = make_allocator(self.pool, self.rows)
        self.pools = SimpleNamespace(
            req_to_token_pool=self.rows, token_to_kv_pool=self.pool, token_to_kv_pool_allocator=self.allocator,
            unified_memory_pool=None,
        )  # fmt: skip
        self.plugin._pools_built(self.pools, self.plugin.starting.configurator)

    @property
    def coordinator(self) -> Any:
        """Of this rank."""
        return self.runtime.coordinator

    def step(self, wanted: dict[str, int], *, idle: bool = False) -> tuple[Entry, ...]:
        """Decide and apply, as around a broadcast."""
        frames = self.coordinator.decide(wanted, idle=idle)
        return tuple(self.coordinator.apply(frames)) if frames else ()

    def publish(self, wanted: dict[str, int], steps: int = 200) -> None:
        """Steps until that much is free: a growth waits behind a reclaim that cannot be cancelled any more."""
        for _ in range(steps):
            self.step(wanted)
            if all(self.runtime.lists[name].available() >= count for name, count in wanted.items()):
                return
            time.sleep(0.002)
        raise AssertionError(self.coordinator.snapshot()["domains"])

    def settle(self, reached: Callable[[], bool], steps: int = 4000) -> None:
        """Idle steps until memory has come back."""
        nothing = dict.fromkeys(self.runtime.lists, 0)
        for _ in range(steps):
            self.step(nothing, idle=True)
            if reached():
                return
            time.sleep(0.002)
        raise AssertionError(self.coordinator.snapshot()["domains"])

    def mapped_bytes(self) -> int:
        """Physical bytes behind the pools."""
        return sum(pool["mapped_bytes"] for pool in self.coordinator.snapshot()["pools"].values())

    def close(self) -> None:
        """Give everything back."""
        if self.coordinator is not None:
            self.coordinator.close()


def stripes(count: int, width: int, seed: int) -> torch.Tensor:
    """Rows that differ from one another and from other seeds."""
    return torch.sin(torch.arange(count * width, dtype=torch.float32) * 0.37 + seed).reshape(count, 1, width)

"""An engine with full attention and a sliding window, of one rank, after a load that has left prefixes all over."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvcached_dist.sglang import specs
from kvcached_dist.sglang.compaction import Compaction
from kvcached_dist.sglang.lists import TokenList
from tests.sglang.prefixes import idle_scheduler, keep, prefix_cache

BLOCKS = {specs.FULL: 60, specs.SWA: 32}
"""Largest id of each allocator."""

RUNS = {specs.FULL: (1, 2, 3, 6, 20, 24), specs.SWA: (1, 2, 3, 6, 12)}
"""Published runs in blocks, one behind the other."""

PROMPTS = 10


class Windowed:
    """Pools, allocator and prefix cache.

    Args:
        pool: the engine's, of as many blocks as :data:`BLOCKS` says.
        lanes: what the ids of each domain index, as bytes, a row for each block.
        page: tokens of a block.
        seed: of what the blocks hold, which differs between ranks; the history does not.
    """

    def __init__(self, pool: Any, lanes: Mapping[str, Sequence[torch.Tensor]], page: int, seed: int = 0) -> None:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

        self.page, self.lanes = page, lanes
        full, swa = (BLOCKS[name] * page for name in (specs.FULL, specs.SWA))
        self.allocator: Any = SWATokenToKVPoolAllocator(full, swa, page, torch.bfloat16, "cpu", pool, False)
        inner = {specs.FULL: self.allocator.full_attn_allocator, specs.SWA: self.allocator.swa_attn_allocator}
        self.lists = {name: TokenList(name, BLOCKS[name] + 1, 1, BLOCKS[name]) for name in inner}
        made = torch.Generator().manual_seed(seed)
        for name, known in self.lists.items():
            for number, count in enumerate(RUNS[name]):
                known.publish(sum(RUNS[name][:number]), count)
            known.bind(inner[name])
            for lane in lanes[name]:
                rows = lane[: sum(RUNS[name])]
                rows.copy_(torch.randint(0, 256, rows.shape, generator=made, dtype=torch.uint8))
        self.cache = prefix_cache(self.allocator, page, "FULL", "SWA", sliding_window_size=2 * page)
        self.scheduler = idle_scheduler(page, self.cache)
        self.prompts: list[list[int]] = []
        self.load(random.Random(3))

    @property
    def table(self) -> torch.Tensor:
        """Window id of each full one; 0: none."""
        return torch.as_tensor(self.allocator.full_to_swa_index_mapping[:-1])

    @property
    def compaction(self) -> Compaction:
        """Of this rank, anew."""
        return Compaction(self.lists, self.scheduler, self.lanes, 1)

    def load(self, choose: random.Random) -> None:
        """Prompts are kept as room is made for the next one; at the end a few are left, most without their window."""
        for number in range(PROMPTS):
            prompt = [100 * number + block for block in range(choose.randrange(3, 7))]
            self.make_room(len(prompt), len(prompt))
            keep(self.cache, prompt, self.alloc(len(prompt)))
            self.prompts.append(prompt)
        for prompt in choose.sample(self.prompts, 3):
            self.tokens(prompt)
        self.make_room(38, 16)

    def alloc(self, blocks: int) -> torch.Tensor:
        """Tokens of so many blocks with their window."""
        tokens = blocks * self.page
        if self.page == 1:
            ids = self.allocator.alloc(tokens)
        else:
            zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens])
            ids = self.allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), tokens)
        assert ids is not None
        return torch.as_tensor(ids)

    def make_room(self, full: int, window: int) -> None:
        """So many blocks of each kind are free afterwards."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        lacking = [
            max(0, wanted - known.available()) * self.page
            for wanted, known in zip((full, window), self.lists.values(), strict=True)
        ]
        self.cache.evict_for_alloc(EvictParams(num_tokens=lacking[0], swa_num_tokens=lacking[1]))

    def tokens(self, prompt: Sequence[int]) -> torch.Tensor:
        """Where a request would find the tokens of a prompt."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", [1000 * block + k for block in prompt for k in range(self.page)]))
        found: torch.Tensor = self.cache.match_prefix(MatchPrefixParams(key=key)).device_indices
        return found.clone()

    def nodes(self) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """Full and window tokens of each node."""
        found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        full, window = self.cache.tree_components
        nodes = list(self.cache.tree_core.root_node.children.values())
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            found[node.id] = node.component_data[full].value, node.component_data[window].value
        return found

    def contents(self) -> dict[int, list[torch.Tensor]]:
        """What lies behind each node, in every lane."""
        found: dict[int, list[torch.Tensor]] = {}
        for node, (full, window) in self.nodes().items():
            found[node] = [lane[full[:: self.page] // self.page].clone() for lane in self.lanes[specs.FULL]]
            if window is not None:
                found[node] += [lane[window[:: self.page] // self.page].clone() for lane in self.lanes[specs.SWA]]
        return found

    def used(self, name: str) -> list[int]:
        """Blocks of a domain that the cache holds, ascending."""
        parts = [pair[name == specs.SWA] for pair in self.nodes().values()]
        return sorted(int(token) // self.page for part in parts if part is not None for token in part[:: self.page])

    def runs_held(self, name: str) -> int:
        """Blocks of the runs in which something is cached."""
        firsts, counts = self.lists[name].book.runs()
        used = set(self.used(name))
        return sum(int(n) for first, n in zip(firsts, counts, strict=True) if used & set(range(first, first + n)))

    def state(self) -> Any:
        """Everything that moving changes, for :func:`tests.sglang.loaded.equal`."""
        free = [known.free_ids().tolist() for known in self.lists.values()]
        lanes = [[lane[: sum(RUNS[name])].clone() for lane in lanes] for name, lanes in self.lanes.items()]
        return [self.used(name) for name in self.lists], free, self.table.clone(), lanes


def heads(page: int) -> tuple[Any, dict[str, list[torch.Tensor]]]:
    """The engine's pool of K and V heads with a window, and its lanes."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool = SWAKVPool(
        size=BLOCKS[specs.FULL] * page, size_swa=BLOCKS[specs.SWA] * page, page_size=page, dtype=torch.bfloat16,
        head_num=2, head_dim=8, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1, 3], device="cpu",
        enable_kv_cache_copy=False,
    )  # fmt: skip
    parts = {specs.FULL: pool.full_kv_pool, specs.SWA: pool.swa_kv_pool}
    return pool, {
        name: [buffer.view(BLOCKS[name] + 1, -1).view(torch.uint8) for buffer in (*part.k_buffer, *part.v_buffer)]
        for name, part in parts.items()
    }

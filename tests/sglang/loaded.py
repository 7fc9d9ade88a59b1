"""An engine's pool, allocator and prefix cache of one rank after a load that has left prefixes all over its runs."""

from __future__ import annotations

import random
from array import array
from typing import Any

import torch

from kvcached_dist.sglang import specs
from kvcached_dist.sglang.census import CopyFactory, HostCopy
from kvcached_dist.sglang.compaction import Compaction
from kvcached_dist.sglang.engine import evict
from kvcached_dist.sglang.lists import TokenList
from tests.sglang.prefixes import idle_scheduler, keep, prefix_cache

PER_PAGE = 8
RUNS = (1, 1, 2, 4, 4, 8, 8, 4)
"""Published runs in pages, one behind the other, as they come under a growing load."""

BLOCKS = 300
"""Largest id of the allocator."""

PUBLISHED = sum(RUNS) * PER_PAGE - 1
"""Ids that the engine can have."""

PROMPTS = 24


class Engine:
    """The engine's pool, allocator and prefix cache of one rank, after a load.

    Args:
        page: tokens of a block.
        kind: ``heads`` or ``latent``.
        need_sort: as the engine's allocators.
        copy: starts a copy of device numbers; anything but the default stands for a device.
        seed: of the rows, which differ between ranks; the history does not.
        dtype: element type that the pool is for.
    """

    def __init__(
        self,
        page: int,
        kind: str,
        *,
        need_sort: bool = False,
        copy: CopyFactory = HostCopy,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        self.page, self.pool, size = page, pool(kind, BLOCKS * page, page, dtype), BLOCKS * page
        for number, buffer in enumerate(self.buffers):
            made = torch.Generator().manual_seed(100 * seed + number)
            buffer.copy_(251 * torch.rand(buffer.shape, generator=made))
        self.allocator: Any = (
            TokenToKVPoolAllocator(size, dtype, "cpu", self.pool, need_sort)
            if page == 1
            else PagedTokenToKVPoolAllocator(size, page, dtype, "cpu", self.pool, need_sort)
        )
        self.known = TokenList(specs.FULL, 304, PER_PAGE, BLOCKS, copy)
        first = 0
        for count in RUNS:
            self.known.publish(first, count)
            first += count
        self.known.bind(self.allocator)
        self.cache = prefix_cache(self.allocator, page, "FULL")
        self.scheduler = idle_scheduler(page, self.cache)
        self.prompts: list[list[int]] = []
        self.load(random.Random(3))

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Of all layers, K and V or latents, a row for each token."""
        return list(getattr(self.pool, "kv_buffer", ())) or [*self.pool.k_buffer, *self.pool.v_buffer]

    @property
    def compaction(self) -> Compaction:
        """Of this rank, anew."""
        return Compaction({specs.FULL: self.known}, self.scheduler, self.lanes, 1)

    @property
    def lanes(self) -> dict[str, list[torch.Tensor]]:
        """What the ids index, a row for each block."""
        return {specs.FULL: [buffer.view(BLOCKS + 1, -1).view(torch.uint8) for buffer in self.buffers]}

    def load(self, choose: random.Random) -> None:
        """Prompts that begin alike are kept; then most of them are evicted, whichever were asked for least lately."""
        for number in range(PROMPTS):
            begins = self.prompts[choose.randrange(number)][: choose.randrange(3)] if number else []
            prompt = [*begins, *(100 * number + block for block in range(choose.randrange(4, 12)))]
            keep(self.cache, prompt, self.alloc(len(prompt)))
            self.prompts.append(prompt)
        for prompt in choose.sample(self.prompts, 7):
            self.tokens(prompt)
        self.evict(self.cached - 45)

    def alloc(self, blocks: int) -> torch.Tensor:
        """Tokens of so many blocks, from the head of the list."""
        ids: torch.Tensor | None = self.allocator.alloc(blocks * self.page)
        assert ids is not None
        return ids

    def evict(self, blocks: int) -> None:
        """Least recently used blocks go."""
        evict(self.cache, blocks * self.page)

    @property
    def cached(self) -> int:
        """Blocks that the cache could give back."""
        return int(self.cache.evictable_size()) // self.page

    def tokens(self, prompt: list[int]) -> torch.Tensor:
        """Where the tree says that the tokens of a prompt are, as far as they are cached."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", [1000 * block + k for block in prompt for k in range(self.page)]))
        found: torch.Tensor = self.cache.match_prefix(MatchPrefixParams(key=key)).device_indices
        return found.clone()

    def rows(self) -> list[list[torch.Tensor]]:
        """Of each prompt: the rows of its cached tokens in every buffer."""
        return [[buffer[self.tokens(prompt)].clone() for buffer in self.buffers] for prompt in self.prompts]

    def used(self) -> list[int]:
        """Blocks in the cache, ascending."""
        values = self.cache.tree_core.all_values_flatten()
        return sorted(set((values // self.page).tolist()))

    def runs_held(self) -> list[int]:
        """Pages of each run in which something is cached."""
        firsts, counts = self.known.book.runs()
        pages = {block // PER_PAGE for block in self.used()}
        return [int(n) for first, n in zip(firsts, counts, strict=True) if pages & set(range(first, first + n))]

    def state(self) -> Any:
        """Everything that moving changes, for :func:`equal`."""
        return self.used(), self.known.free_ids().tolist(), [b.clone() for b in self.buffers], self.rows()


def pool(kind: str, tokens: int, page: int, dtype: torch.dtype) -> Any:
    """The engine's pool of K and V heads (``heads``) or of latents, of three layers."""
    from sglang.srt.mem_cache import memory_pool

    options: dict[str, Any] = {"layer_num": 3, "device": "cpu", "enable_memory_saver": False, "dtype": dtype}
    if kind == "latent":
        return memory_pool.MLATokenToKVPool(tokens, page_size=page, kv_lora_rank=24, qk_rope_head_dim=8, **options)
    return memory_pool.MHATokenToKVPool(tokens, page_size=page, head_num=2, head_dim=8, **options)


def equal(one: Any, other: Any) -> bool:
    """Whether nested lists of tensors and numbers are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)

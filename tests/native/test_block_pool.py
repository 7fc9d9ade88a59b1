"""BlockPool against an allocator that is written straight from the rule, and its own refusals."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcached_dist._native import BlockPool


class SlowPool:
    """The rule, one block at a time: fullest page, then lowest page, then lowest block."""

    def __init__(self, pages: int, blocks_per_page: int) -> None:
        self.pages, self.blocks_per_page = pages, blocks_per_page
        self.free_blocks: dict[int, set[int]] = {}

    def blocks_of(self, page: int) -> set[int]:
        return set(range(page * self.blocks_per_page, (page + 1) * self.blocks_per_page))

    def publish(self, first: int, count: int) -> None:
        for page in range(first, first + count):
            self.free_blocks[page] = self.blocks_of(page)

    def retire(self, first: int, count: int) -> None:
        for page in range(first, first + count):
            del self.free_blocks[page]

    def is_free(self, first: int, count: int) -> bool:
        return all(self.free_blocks.get(p, set()) == self.blocks_of(p) for p in range(first, first + count))

    def available(self) -> int:
        return sum(len(blocks) for blocks in self.free_blocks.values())

    def alloc(self, n: int) -> list[int] | None:
        if n > self.available():
            return None
        taken = []
        for _ in range(n):
            page = min((p for p, free in self.free_blocks.items() if free), key=lambda p: (len(self.free_blocks[p]), p))
            taken.append(min(self.free_blocks[page]))
            self.free_blocks[page].remove(taken[-1])
        return taken

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            self.free_blocks[block // self.blocks_per_page].add(block)


class Agreement(RuleBasedStateMachine):
    """Any sequence of operations leads both to the same ids."""

    @initialize(pages=st.integers(1, 70), blocks_per_page=st.sampled_from([1, 2, 3, 16, 64, 100]))
    def start(self, pages: int, blocks_per_page: int) -> None:
        self.fast, self.slow = BlockPool(pages, blocks_per_page), SlowPool(pages, blocks_per_page)
        self.taken: list[int] = []

    @rule(data=st.data())
    def publish_or_retire(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, self.slow.pages - 1))
        count = data.draw(st.integers(1, min(9, self.slow.pages - first)))
        published = [page in self.slow.free_blocks for page in range(first, first + count)]
        assert self.fast.run_is_free(first, count) == self.slow.is_free(first, count)
        if not any(published):
            self.fast.publish(first, count)
            self.slow.publish(first, count)
            return
        with pytest.raises(ValueError, match="published already"):
            self.fast.publish(first, count)
        if self.slow.is_free(first, count):
            self.fast.retire(first, count)
            self.slow.retire(first, count)
            return
        with pytest.raises(ValueError, match=r"not published|in use"):
            self.fast.retire(first, count)

    @rule(n=st.integers(0, 300))
    def alloc(self, n: int) -> None:
        ids, expected = self.fast.alloc(n), self.slow.alloc(n)
        if expected is None or ids is None:
            assert (ids, expected) == (None, None)
            return
        assert ids.dtype == np.int64
        assert ids.tolist() == expected
        self.taken += expected

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = data.draw(st.permutations(self.taken))[: data.draw(st.integers(0, 200))]
        self.fast.free(np.array(blocks, np.int64))
        self.slow.free(blocks)
        self.taken = sorted(set(self.taken) - set(blocks))

    @rule(data=st.data())
    def free_badly(self, data: st.DataObject) -> None:
        total = self.slow.pages * self.slow.blocks_per_page
        good = data.draw(st.permutations(self.taken))[:5]
        unusable = sorted({-1, total, *range(total)} - set(self.taken)) + good[:1]
        blocks = [*good, data.draw(st.sampled_from(unusable))]
        with pytest.raises(ValueError, match=rf"block {blocks[-1]} .*nothing was freed"):
            self.fast.free(np.array(blocks, np.int64))

    @rule()
    def reset(self) -> None:
        self.fast.reset()
        for page in self.slow.free_blocks:
            self.slow.free_blocks[page] = self.slow.blocks_of(page)
        self.taken = []

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "fast"):
            assert self.fast.available() == self.slow.available()
            assert self.fast.published() == len(self.slow.free_blocks) * self.slow.blocks_per_page


Agreement.TestCase.settings = settings(max_examples=12, stateful_step_count=14, deadline=None, derandomize=True)
test_any_sequence_gives_the_ids_of_the_rule = pytest.mark.slow(Agreement.TestCase)


@pytest.mark.parametrize(("seed", "blocks_per_page"), [(0, 1), (1, 4), (2, 7), (3, 64), (4, 130)])
def test_a_long_random_sequence_gives_the_ids_of_the_rule(seed: int, blocks_per_page: int) -> None:
    random_ = random.Random(seed)
    fast, slow = BlockPool(70, blocks_per_page), SlowPool(70, blocks_per_page)
    for pool in (fast, slow):
        pool.publish(0, 9)
        pool.publish(60, 10)
    taken: list[int] = []
    for _ in range(60):
        if taken and random_.random() < 0.5:
            random_.shuffle(taken)
            cut = random_.randint(0, len(taken))
            back, taken = taken[:cut], taken[cut:]
            fast.free(np.array(back, np.int64))
            slow.free(back)
        ids, expected = fast.alloc(n := random_.randint(0, 3 * blocks_per_page)), slow.alloc(n)
        assert (None if ids is None else ids.tolist()) == expected
        taken += expected or []
        assert fast.available() == slow.available()


def test_the_fullest_page_goes_first_so_that_the_emptiest_drains() -> None:
    pool = BlockPool(3, 4)
    pool.publish(0, 3)
    ids = pool.alloc(12)
    assert ids is not None
    pool.free(np.array([0, 1, 2, 9, 4, 5], np.int64))  # free: three in page 0, two in page 1, one in page 2
    again = pool.alloc(6)
    assert again is not None
    assert again.tolist() == [9, 4, 5, 0, 1, 2]


def test_a_miss_takes_nothing() -> None:
    pool = BlockPool(4, 4)
    assert pool.alloc(1) is None
    pool.publish(1, 1)
    assert pool.alloc(5) is None
    ids = pool.alloc(4)
    assert ids is not None
    assert ids.tolist() == [4, 5, 6, 7]
    assert (pool.available(), pool.published()) == (0, 4)


@pytest.mark.parametrize(
    ("bad", "why"),
    [(-1, "not in"), (16, "not in"), (12, "not published"), (3, "free already"), (0, "named twice")],
)
def test_a_bad_id_is_named_and_nothing_is_freed(bad: int, why: str) -> None:
    pool = BlockPool(4, 4)
    pool.publish(0, 3)
    assert pool.alloc(3) is not None
    with pytest.raises(ValueError, match=rf"block {bad} .*{why}"):
        pool.free(np.array([0, 1, bad, 2], np.int64))
    assert pool.available() == 9
    pool.free(np.array([0, 1, 2], np.int64))
    assert pool.run_is_free(0, 3)


def test_runs_outside_are_refused() -> None:
    pool = BlockPool(4, 4)
    for first, count in ((-1, 1), (0, 0), (4, 1), (3, 2), (1 << 62, 1 << 62)):
        for call in (pool.publish, pool.retire, pool.run_is_free):
            with pytest.raises(ValueError, match="not inside a pool of 4 pages"):
                call(first, count)
    for pages, blocks_per_page in ((0, 1), (1, 0), (1 << 40, 1), (1 << 35, 4)):
        with pytest.raises(ValueError, match="block pool"):
            BlockPool(pages, blocks_per_page)
    with pytest.raises(ValueError, match="-1"):
        pool.alloc(-1)


def test_a_retirement_is_all_or_nothing() -> None:
    pool = BlockPool(4, 2)
    pool.publish(0, 4)
    assert pool.alloc(1) is not None
    with pytest.raises(ValueError, match=r"page 0 of pages .* has 1 blocks in use"):
        pool.retire(0, 4)
    assert pool.published() == 8
    pool.retire(1, 3)
    assert (pool.published(), pool.available()) == (2, 1)


def test_torch_tensors_can_be_freed_and_what_is_handed_out_outlives_the_pool() -> None:
    pool = BlockPool(4, 4)
    pool.publish(0, 4)
    ids = pool.alloc(16)
    assert ids is not None
    pool.free(torch.from_numpy(ids))  # type: ignore[arg-type]
    assert pool.available() == 16
    pool.sort()
    del pool
    assert ids.tolist() == list(range(16))


@pytest.mark.parametrize("blocks_per_page", [1, 3])
def test_a_pinned_block_is_never_freed_and_nothing_beside_it_is(blocks_per_page: int) -> None:
    pool = BlockPool(8, blocks_per_page)
    pool.publish(0, 8)
    ids = pool.alloc(3)
    assert ids is not None
    pool.pin(0)
    with pytest.raises(ValueError, match="block 0 is pinned"):
        pool.free(ids[::-1].copy())
    assert pool.available() == 8 * blocks_per_page - 3
    with pytest.raises(ValueError, match="in use"):
        pool.pin(7 * blocks_per_page)


@pytest.mark.parametrize("blocks_per_page", [1, 3])
def test_the_digest_of_ids_sees_every_id_and_their_order(blocks_per_page: int) -> None:
    def digest(order: list[int]) -> int:
        pool = BlockPool(200, blocks_per_page)
        pool.publish(0, 200)
        pool.alloc(150)
        pool.free(np.array(order, dtype=np.int64))
        return pool.ids_digest

    ids = list(range(70))
    swapped = [ids[1], ids[0], *ids[2:]]
    crossed = [*ids[:3], ids[64], *ids[4:64], ids[3], *ids[65:]]
    seen = [digest(ids), digest(swapped), digest(crossed), digest(ids[:-1]), digest([*ids[:-1], 99])]
    assert len(set(seen)) == len(seen)
    assert digest(ids) == seen[0]


def test_ids_at_an_address_are_freed_like_those_of_an_array() -> None:
    pool = BlockPool(100, 1)
    pool.publish(0, 100)
    ids = pool.alloc(70)
    assert ids is not None
    pool.free_at(ids[5:].ctypes.data, 65)
    assert pool.available() == 95
    with pytest.raises(ValueError, match="free already"):
        pool.free_at(ids.ctypes.data, 70)
    assert pool.available() == 95

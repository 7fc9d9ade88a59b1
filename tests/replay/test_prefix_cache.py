"""The prefix cache: what is found again, what goes first, what stays."""

from __future__ import annotations

import pytest

from kvcached_dist.replay.prefix_cache import CacheShape, Node, PrefixCache

SHAPE = CacheShape(full_blocks=2, swa_blocks=2, window_tokens=128)


def cache_of(shape: CacheShape = SHAPE, bound: int = 10_000) -> PrefixCache:
    return PrefixCache(shape, bound)


def add(cache: PrefixCache, hashes: tuple[int, ...], *, window: bool = True) -> list[Node]:
    """Insert a prefix, unlocked, with its last window block kept."""
    path: list[Node] = []
    parent = cache.root
    for depth, hash_id in enumerate(hashes):
        node = parent.children.get(hash_id)
        if node is None:
            first = 1000 * hash_id + 2 * depth
            node = cache.insert(parent, hash_id, [first, first + 1], [-first, -first - 1])
            cache.unlock([node])
        path.append(node)
        parent = node
    if window and parent.swa[-1] < 0:
        cache.keep_window(parent, 1, 7000 + hashes[-1], -7)
    return path


def test_a_prefix_is_usable_only_up_to_an_end_whose_window_is_there() -> None:
    cache = cache_of()
    add(cache, (1, 2), window=True)
    path = add(cache, (1, 2, 3, 4), window=False)
    found = cache.walk((1, 2, 3, 9), limit=4)
    assert found == path[:3]
    assert cache.usable(found) == 2
    assert cache.usable(cache.walk((1,), limit=1)) == 0


def test_without_a_sliding_window_every_end_is_usable() -> None:
    cache = cache_of(CacheShape(full_blocks=2, swa_blocks=0, window_tokens=0))
    path = add(cache, (1, 2, 3), window=False)
    assert cache.usable(path) == 3
    assert cache.window_slots(3) == []


def test_a_window_longer_than_a_node_reaches_back_over_several() -> None:
    cache = cache_of(CacheShape(full_blocks=2, swa_blocks=2, window_tokens=1024))
    assert cache.window_slots(3) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert cache.window_slots(1) == [(0, 0), (0, 1)]


def test_least_recently_used_leaves_go_first_and_parents_only_after_their_children() -> None:
    cache = cache_of()
    old, new = add(cache, (1, 2)), add(cache, (1, 3))
    cache.touch(new)
    cache.touch(old)
    assert cache.evict(1).full == new[1].full
    evicted = cache.evict(1024)
    assert evicted.full == old[1].full + old[0].full
    assert evicted.tokens == 1024
    assert cache.tokens == cache.evictable_tokens == 0


def test_eviction_hands_out_the_window_blocks_too() -> None:
    cache = cache_of()
    add(cache, (5,))
    evicted = cache.evict(512)
    assert (evicted.swa, evicted.swa_stamps) == ([7005], [-7])


def test_locked_nodes_stay_and_so_does_what_leads_to_them() -> None:
    cache = cache_of()
    path = add(cache, (1, 2))
    add(cache, (1, 3))
    cache.lock(path)
    assert cache.evictable_tokens == 512
    assert cache.evict(10_000).tokens == 512
    cache.unlock(path)
    assert cache.evict(10_000).tokens == 1024


def test_unlocking_more_often_than_locking_is_refused() -> None:
    cache = cache_of()
    with pytest.raises(ValueError, match="hash block 1 at depth 1 is not locked"):
        cache.unlock(add(cache, (1,)))


def test_a_node_or_a_window_slot_is_given_once() -> None:
    cache = cache_of()
    node = add(cache, (1,))[0]
    with pytest.raises(ValueError, match="hash block 1"):
        cache.insert(cache.root, 1, [1, 2], [1, 2])
    with pytest.raises(ValueError, match="slot 1 is taken"):
        cache.keep_window(node, 1, 9, 9)


def test_excess_counts_what_is_above_the_bound_and_can_go() -> None:
    cache = cache_of(bound=512)
    path = add(cache, (1, 2, 3))
    assert cache.excess_tokens == 1024
    cache.lock(path[:2])
    assert cache.excess_tokens == 512


@pytest.mark.parametrize(
    ("block", "fits"), [(256, True), (64, True), (512, True), (1, True), (96, False), (1024, False), (0, False)]
)
def test_only_blocks_that_tile_a_hash_block_can_be_shared(block: int, fits: bool) -> None:
    assert CacheShape.fits(block) is fits

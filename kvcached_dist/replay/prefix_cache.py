"""Prefix cache: blocks that outlive their request, found again by hash ids.

A tree with one node per 512-token hash block. A node holds the full-attention blocks of its tokens and, where
a request left them, the sliding-window blocks: a prefix can be entered only where the whole window before its end
is still there, so requests leave the window at the end of their prompt and at the point where they
branched off, and nothing in between.

Order of use decides what goes first, by a counter, never a clock: equal calls give equal trees on every rank.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from .workload import HASH_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How hash blocks relate to the blocks of the domains.

    Attributes:
        full_blocks: blocks of the ``full`` domain per node; at least 1.
        swa_blocks: blocks of the ``swa`` domain per node; 0 when the model has none.
        window_tokens: tokens of the sliding window; 0 when the model has none.
    """

    full_blocks: int
    swa_blocks: int
    window_tokens: int

    @staticmethod
    def fits(block_tokens: int) -> bool:
        """Whether blocks of this size tile a hash block; only then can prefixes be shared."""
        return 0 < block_tokens <= HASH_BLOCK_TOKENS and HASH_BLOCK_TOKENS % block_tokens == 0


@dataclass(slots=True, eq=False)
class Node:
    """One hash block of one prefix.

    Attributes:
        hash_id: the id below its parent.
        depth: number of hash blocks of the prefix that ends here; 0 for the root.
        full: block ids of the ``full`` domain, with their stamps.
        swa: block id per slot of the ``swa`` domain, -1 where the window was not kept.
        refs: running requests that use this node or one below it.
        last_use: value of the cache's counter at the last match or insertion.
    """

    hash_id: int
    depth: int
    parent: Node | None
    full: list[int]
    full_stamps: list[int]
    swa: list[int]
    swa_stamps: list[int]
    refs: int = 0
    last_use: int = 0
    children: dict[int, Node] = field(default_factory=dict)


@dataclass(slots=True)
class Evicted:
    """Blocks that left the cache and now belong to the caller, with the stamps that they must carry."""

    full: list[int] = field(default_factory=list)
    full_stamps: list[int] = field(default_factory=list)
    swa: list[int] = field(default_factory=list)
    swa_stamps: list[int] = field(default_factory=list)
    tokens: int = 0


class PrefixCache:
    """The tree. Not thread-safe: one scheduler owns it.

    Args:
        shape: blocks per node and window.
        bound_tokens: tokens above which :attr:`excess_tokens` asks for eviction. The cache never evicts by itself.
    """

    def __init__(self, shape: CacheShape, bound_tokens: int) -> None:
        self.shape = shape
        self.bound_tokens = bound_tokens
        self.root = Node(-1, 0, None, [], [], [], [])
        self.tokens = 0
        self.evictable_tokens = 0
        self._uses = 0

    @property
    def excess_tokens(self) -> int:
        """Evictable tokens above the bound."""
        return min(self.evictable_tokens, max(0, self.tokens - self.bound_tokens))

    def walk(self, hash_ids: tuple[int, ...], limit: int) -> list[Node]:
        """Nodes that exist along ``hash_ids``, at most ``limit`` of them, shallowest first."""
        path = []
        node = self.root
        for hash_id in hash_ids[:limit]:
            below = node.children.get(hash_id)
            if below is None:
                break
            path.append(below)
            node = below
        return path

    def usable(self, path: list[Node]) -> int:
        """How many nodes of ``path`` a request can start behind: the deepest end with its window."""
        if not self.shape.swa_blocks:
            return len(path)
        for depth in range(len(path), 0, -1):
            if all(path[node].swa[slot] >= 0 for node, slot in self.window_slots(depth)):
                return depth
        return 0

    def window_slots(self, depth: int) -> list[tuple[int, int]]:
        """(node index, slot) of the sliding-window blocks before the end of ``depth`` nodes."""
        if not self.shape.swa_blocks:
            return []
        block_tokens = HASH_BLOCK_TOKENS // self.shape.swa_blocks
        end = depth * HASH_BLOCK_TOKENS
        first = max(0, end - self.shape.window_tokens) // block_tokens
        return [divmod(block, self.shape.swa_blocks) for block in range(first, end // block_tokens)]

    def touch(self, path: list[Node]) -> None:
        """Note a use of every node of ``path``; deeper nodes count as older, so leaves go first."""
        for node in reversed(path):
            self._uses += 1
            node.last_use = self._uses

    def lock(self, path: list[Node]) -> None:
        """Keep ``path`` until :meth:`unlock`. Every node above the last one must be in it."""
        for node in path:
            if node.refs == 0:
                self.evictable_tokens -= HASH_BLOCK_TOKENS
            node.refs += 1

    def unlock(self, path: list[Node]) -> None:
        """End one :meth:`lock` of these nodes."""
        for node in path:
            if node.refs < 1:
                raise ValueError(f"hash block {node.hash_id} at depth {node.depth} is not locked")
            node.refs -= 1
            if node.refs == 0:
                self.evictable_tokens += HASH_BLOCK_TOKENS

    def insert(self, parent: Node, hash_id: int, full: list[int], stamps: list[int]) -> Node:
        """Add a node, locked once for the caller; the blocks now belong to the cache.

        Raises:
            ValueError: the node exists, or the number of blocks is wrong.
        """
        if hash_id in parent.children or len(full) != self.shape.full_blocks or len(stamps) != len(full):
            raise ValueError(f"hash block {hash_id} below depth {parent.depth}: exists, or {len(full)} blocks")
        self._uses += 1
        empty = [-1] * self.shape.swa_blocks
        node = Node(hash_id, parent.depth + 1, parent, full, stamps, empty, [0] * len(empty), 1, self._uses)
        parent.children[hash_id] = node
        self.tokens += HASH_BLOCK_TOKENS
        return node

    def keep_window(self, node: Node, slot: int, block: int, stamp: int) -> None:
        """Give one sliding-window block to the cache.

        Raises:
            ValueError: the slot is taken.
        """
        if node.swa[slot] >= 0:
            raise ValueError(f"hash block {node.hash_id} at depth {node.depth}: window slot {slot} is taken")
        node.swa[slot] = block
        node.swa_stamps[slot] = stamp

    def evict(self, tokens: int) -> Evicted:
        """Take the least recently used nodes out, leaves first, until ``tokens`` tokens are gone.

        Nodes that running requests use stay; so less may be evicted than asked.

        Args:
            tokens: rounded up to whole nodes.
        """
        evicted = Evicted()
        leaves = [(node.last_use, node) for node in self._nodes() if not node.refs and not node.children]
        # last_use is unique, so nodes themselves are never compared.
        heapq.heapify(leaves)
        while leaves and evicted.tokens < tokens:
            _, node = heapq.heappop(leaves)
            self._drop(node, evicted)
            above = node.parent
            if above is not None and above is not self.root and not above.refs and not above.children:
                heapq.heappush(leaves, (above.last_use, above))
        return evicted

    def _drop(self, node: Node, evicted: Evicted) -> None:
        above = node.parent
        if above is None:
            raise ValueError("the root of the prefix cache cannot be evicted")
        del above.children[node.hash_id]
        self.tokens -= HASH_BLOCK_TOKENS
        self.evictable_tokens -= HASH_BLOCK_TOKENS
        evicted.tokens += HASH_BLOCK_TOKENS
        evicted.full += node.full
        evicted.full_stamps += node.full_stamps
        for block, stamp in zip(node.swa, node.swa_stamps, strict=True):
            if block >= 0:
                evicted.swa.append(block)
                evicted.swa_stamps.append(stamp)

    def _nodes(self) -> list[Node]:
        found = list(self.root.children.values())
        for node in found:
            found.extend(node.children.values())
        return found


__all__ = ["CacheShape", "Evicted", "Node", "PrefixCache"]

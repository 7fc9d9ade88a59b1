"""One request while it runs: what it holds, how far it is, and what it may give back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from . import identity
from .prefix_cache import Node, PrefixCache
from .workload import HASH_BLOCK_TOKENS, Request

NOT_OWNED = -1
"""Stands in a sequence's window for a block that belongs to the prefix cache."""


class Phase(Enum):
    """Where a running request is."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the scheduler needs to know of the model's domains.

    Attributes:
        full_tokens: tokens of one block of ``full``; 0 when the model has no such domain.
        swa_tokens: tokens of one block of ``swa``; 0 when the model has none.
        window_tokens: sliding window of ``swa``.
        slots: domains of which a request takes one block while it runs (``rows``, ``mamba``), in the model's order.
        slot_limit: requests that the logical capacity of these domains allows at once.
        share_prefixes: prefixes can be entered in the middle (blocks tile a hash block, no recurrent state).
    """

    full_tokens: int
    swa_tokens: int
    window_tokens: int
    slots: tuple[str, ...] = ()
    slot_limit: int = 1 << 30
    share_prefixes: bool = True


@dataclass(slots=True)
class Blocks:
    """Blocks of one domain and the stamps that they must carry."""

    ids: list[int] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)

    def add(self, block: int, stamp: int) -> None:
        """Append one block."""
        self.ids.append(block)
        self.stamps.append(stamp)

    def extend(self, ids: list[int], stamps: list[int]) -> None:
        """Append several blocks."""
        self.ids += ids
        self.stamps += stamps

    def __len__(self) -> int:
        return len(self.ids)


class Sequence:
    """A request that has been admitted.

    Args:
        request: what is asked.
        attempt: how often the request was retracted before.
        produced: output tokens of earlier attempts; they are prefilled together with the prompt.
        shape: the model's domains.
    """

    __slots__ = (
        "attempt",
        "checkpoints",
        "computed",
        "full",
        "path",
        "phase",
        "prefix_keys",
        "private",
        "produced",
        "request",
        "request_key",
        "shape",
        "short_since",
        "slots",
        "swa",
        "swa_first",
        "target",
    )

    def __init__(self, request: Request, attempt: int, produced: int, shape: Shape) -> None:
        self.request = request
        self.attempt = attempt
        self.produced = produced
        self.shape = shape
        self.target = request.prompt_tokens + produced
        self.computed = 0
        """Tokens handed to the pipeline so far."""
        self.phase = Phase.PREFILL
        shareable = request.full_hash_blocks if shape.share_prefixes else 0
        self.prefix_keys = identity.prefix_keys(request.hash_ids[:shareable])
        self.request_key = identity.request_key(request.index, attempt)
        self.full = Blocks()
        self.private: list[bool] = []
        """Per hash block passed: its full blocks are this sequence's own, not the cache's."""
        self.swa = Blocks()
        self.swa_first = 0
        """Index of the sequence block that ``swa.ids[0]`` is."""
        self.slots: dict[str, tuple[int, int]] = {}
        self.path: list[Node] = []
        self.short_since: int | None = None
        """Step of the first miss since the last blocks came; kept by the scheduler."""
        self.checkpoints: set[int] = set()
        """Depths at whose end the window goes to the cache; only asked for membership."""

    def stamp(self, block_index: int, block_tokens: int) -> int:
        """Expected content of the sequence's block ``block_index`` in a domain of this block size."""
        node = block_index * block_tokens // HASH_BLOCK_TOKENS
        key = self.prefix_keys[node] if node < len(self.prefix_keys) else self.request_key
        return identity.stamp(key, block_index)

    def needs(self, tokens: int) -> dict[str, int]:
        """Blocks to allocate before ``tokens`` more tokens can be computed; empty when none."""
        end = self.computed + tokens
        need = {}
        if self.shape.full_tokens:
            missing = -(-end // self.shape.full_tokens) - len(self.full)
            if missing > 0:
                need["full"] = missing
        if self.shape.swa_tokens:
            missing = -(-end // self.shape.swa_tokens) - self.swa_first - len(self.swa)
            if missing > 0:
                need["swa"] = missing
        for name in self.shape.slots:
            if name not in self.slots:
                need[name] = 1
        return need

    def enter(self, cache: PrefixCache) -> tuple[Blocks, Blocks]:
        """Start behind the longest usable prefix in ``cache`` and lock it.

        Returns:
            The blocks of ``full`` and ``swa`` that are reused, with the stamps that they must carry.
        """
        hashes = self.request.hash_ids
        # One token at least must be computed: its logits are the first output.
        limit = min(len(self.prefix_keys), (self.target - 1) // HASH_BLOCK_TOKENS)
        present = cache.walk(hashes, limit)
        usable = cache.usable(present)
        self.path = present[:usable]
        self.checkpoints = {len(present), len(self.prefix_keys)}
        cache.touch(self.path)
        cache.lock(self.path)
        self.private = [False] * usable
        self.computed = usable * HASH_BLOCK_TOKENS
        full, swa = Blocks(), Blocks()
        if self.shape.full_tokens:
            ids = [block for node in self.path for block in node.full]
            full.extend(ids, [self.stamp(index, self.shape.full_tokens) for index in range(len(ids))])
            self.full.extend(list(full.ids), list(full.stamps))
        if self.shape.swa_tokens:
            self.swa_first = self.computed // self.shape.swa_tokens
            for node, slot in cache.window_slots(usable):
                index = node * cache.shape.swa_blocks + slot
                swa.add(self.path[node].swa[slot], self.stamp(index, self.shape.swa_tokens))
        return full, swa

    def take(self, granted: dict[str, list[int]]) -> dict[str, Blocks]:
        """Append newly allocated blocks.

        Returns:
            Per domain the new blocks with the stamps to write.
        """
        written: dict[str, Blocks] = {}
        for name, ids in granted.items():
            if name == "full":
                start, tokens, held = len(self.full), self.shape.full_tokens, self.full
            elif name == "swa":
                start, tokens, held = self.swa_first + len(self.swa), self.shape.swa_tokens, self.swa
            else:
                stamp = identity.stamp(self.request_key, 0)
                self.slots[name] = (ids[0], stamp)
                written[name] = Blocks([ids[0]], [stamp])
                continue
            stamps = [self.stamp(start + offset, tokens) for offset in range(len(ids))]
            held.extend(ids, stamps)
            written[name] = Blocks(list(ids), stamps)
        return written

    def share(self, cache: PrefixCache) -> None:
        """Give the hash blocks computed so far to the cache, and the window where it is worth keeping."""
        if not self.shape.share_prefixes:
            return
        while len(self.path) < len(self.prefix_keys) and (len(self.path) + 1) * HASH_BLOCK_TOKENS <= self.computed:
            depth = len(self.path)
            parent = self.path[-1] if self.path else cache.root
            hash_id = self.request.hash_ids[depth]
            node = parent.children.get(hash_id)
            if node is None:
                per_node = cache.shape.full_blocks
                span = slice(depth * per_node, (depth + 1) * per_node)
                node = cache.insert(parent, hash_id, self.full.ids[span], self.full.stamps[span])
                self.private.append(False)
            else:
                # Another request computed the same prefix meanwhile; this one keeps its own copy.
                cache.lock([node])
                cache.touch([node])
                self.private.append(True)
            self.path.append(node)
            if depth + 1 in self.checkpoints:
                self._keep_window(cache, depth + 1)

    def _keep_window(self, cache: PrefixCache, depth: int) -> None:
        for node, slot in cache.window_slots(depth):
            at = node * cache.shape.swa_blocks + slot - self.swa_first
            if 0 <= at < len(self.swa) and self.swa.ids[at] != NOT_OWNED and self.path[node].swa[slot] < 0:
                cache.keep_window(self.path[node], slot, self.swa.ids[at], self.swa.stamps[at])
                self.swa.ids[at] = NOT_OWNED

    def retire_window(self) -> Blocks:
        """Take out the sliding-window blocks that no later token can see.

        Returns:
            Blocks to give back. Their compressed history in ``full`` stays.
        """
        gone = Blocks()
        if not self.shape.swa_tokens:
            return gone
        first = max(0, self.computed - self.shape.window_tokens) // self.shape.swa_tokens
        drop = min(first - self.swa_first, len(self.swa))
        if drop <= 0:
            return gone
        for block, stamp in zip(self.swa.ids[:drop], self.swa.stamps[:drop], strict=True):
            if block != NOT_OWNED:
                gone.add(block, stamp)
        del self.swa.ids[:drop], self.swa.stamps[:drop]
        self.swa_first += drop
        return gone

    def release(self, cache: PrefixCache) -> dict[str, Blocks]:
        """Give up everything: unlock the prefix and hand out what the sequence owns.

        Returns:
            Per domain, in a fixed order, the blocks to give back.
        """
        cache.unlock(self.path)
        freed = {"full": Blocks(), "swa": Blocks()}
        per_node = cache.shape.full_blocks
        for index, (block, stamp) in enumerate(zip(self.full.ids, self.full.stamps, strict=True)):
            node = index // per_node if per_node else len(self.private)
            if node >= len(self.private) or self.private[node]:
                freed["full"].add(block, stamp)
        for block, stamp in zip(self.swa.ids, self.swa.stamps, strict=True):
            if block != NOT_OWNED:
                freed["swa"].add(block, stamp)
        for name in self.shape.slots:
            if name in self.slots:
                freed[name] = Blocks([self.slots[name][0]], [self.slots[name][1]])
        self.path, self.private, self.slots = [], [], {}
        self.full, self.swa = Blocks(), Blocks()
        return {name: blocks for name, blocks in freed.items() if len(blocks)}


__all__ = ["NOT_OWNED", "Blocks", "Phase", "Sequence", "Shape"]

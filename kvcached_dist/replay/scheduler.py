"""Deterministic continuous batching: the same decisions on every rank.

Every rank runs this scheduler over the same trace. It reads the requests, its own state, the verdicts of the
block store and the entries of the leader's log, and nothing else: no clock, no device, no set order. So the
sequence of operations is equal on all ranks without a message.

One step, in this order, which is the same on every rank relative to the mark of the step:

1. :meth:`Scheduler.evict` for every EVICT entry of the mark;
2. :meth:`Scheduler.begin`: results of the batch ``depth`` steps ago, finished requests leave, one retraction;
3. :meth:`Scheduler.schedule`: windows retire, decodes, the prefill chunk, admission.

A running request decodes one token every ``depth`` steps, because its next token needs the result of the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import CapacityError
from .batch import Batch, Item, Totals
from .block_store import BlockStore
from .prefix_cache import CacheShape, PrefixCache
from .sequence import Blocks, Phase, Sequence, Shape
from .workload import HASH_BLOCK_TOKENS, Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings; equal on all ranks.

    Attributes:
        depth: a batch's result is processed this many steps later; at least 1.
        chunk_tokens: most prefill tokens of one step.
        max_running: most requests at once.
        cached_tokens: bound of the prefix cache.
        patience_steps: steps a short request waits for eviction or reclaim before another one is retracted.
        admission_pause_steps: steps without admissions after one missed.
    """

    depth: int = 1
    chunk_tokens: int = 2048
    max_running: int = 256
    cached_tokens: int = 200_000
    patience_steps: int = 8
    admission_pause_steps: int = 4


class Scheduler:
    """The scheduler of one rank. Not thread-safe.

    Args:
        requests: the trace in arrival order.
        shape: the model's domains.
        config: settings, equal on all ranks.
        store: where blocks come from.
    """

    def __init__(self, requests: list[Request], shape: Shape, config: SchedulerConfig, store: BlockStore) -> None:
        self.shape = shape
        self.config = config
        self.totals = Totals()
        self.running: list[Sequence] = []
        """Admitted requests, oldest first (by position in the trace)."""
        self.starving: str | None = None
        """The only request there is and what it lacks, while no memory is found for it and nothing here makes room."""
        self.cache = PrefixCache(_cache_shape(shape), config.cached_tokens)
        self._store = store
        self._requests = requests
        self._arrived = 0
        self._waiting: deque[tuple[Request, int, int]] = deque()
        """(request, attempt, output tokens of earlier attempts), oldest first."""
        self._ready: list[list[Sequence]] = [[] for _ in range(config.depth)]
        self._in_flight: deque[Batch] = deque()
        self._evict_asked = 0
        self._held: dict[str, int] = {}
        """Blocks that are allocated now, per domain."""
        self._retract = False
        self._admit_from = 0
        self._limit = min(config.max_running, shape.slot_limit)

    @property
    def done(self) -> bool:
        """Every request of the trace is complete and every result processed."""
        return self.totals.completed == len(self._requests) and not any(batch.items for batch in self._in_flight)

    @property
    def busy(self) -> bool:
        """Something runs, waits or is in flight."""
        return bool(self.running or self._waiting or any(batch.items for batch in self._in_flight))

    @property
    def next_arrival_us(self) -> int | None:
        """Arrival of the next request that has not arrived yet, or None."""
        return self._requests[self._arrived].arrival_us if self._arrived < len(self._requests) else None

    def demand(self) -> dict[str, int]:
        """Largest allocation that one step can make now, per domain, in blocks (W of the design)."""
        chunk = self.config.chunk_tokens if self._waiting or self._prefilling() else 0
        decoding = len(self.running)
        wanted: dict[str, int] = {}
        if self.shape.full_tokens:
            wanted["full"] = -(-chunk // self.shape.full_tokens) + -(-decoding // self.config.depth)
        if self.shape.swa_tokens:
            wanted["swa"] = -(-chunk // self.shape.swa_tokens) + -(-decoding // self.config.depth)
        for name in self.shape.slots:
            wanted[name] = 1 if chunk else 0
        return wanted

    # ---------------------------------------------------------------- 1. marks

    def evict(self, tokens: int) -> None:
        """Apply an EVICT entry of the log."""
        self._evict_asked = 0
        self._give_back_evicted(tokens)

    def flush(self) -> None:
        """Empty the prefix cache after the trace, on every rank at the same step.

        Raises:
            ValueError: a request still runs.
        """
        if self.busy:
            raise ValueError("the prefix cache can only be flushed when nothing runs")
        self._give_back_evicted(self.cache.tokens)

    def _give_back_evicted(self, tokens: int) -> None:
        evicted = self.cache.evict(tokens)
        self.totals.evicted_tokens += evicted.tokens
        self._free({"full": Blocks(evicted.full, evicted.full_stamps), "swa": Blocks(evicted.swa, evicted.swa_stamps)})

    # -------------------------------------------------------------- 2. results

    def begin(self, step: int, now_us: int) -> Batch | None:
        """Process the result of batch ``step - depth`` and let new requests arrive.

        Args:
            step: the engine's step number; consecutive.
            now_us: virtual time.

        Returns:
            The batch whose result was processed, or None in the first steps.
        """
        result = None
        if self._in_flight and self._in_flight[0].step == step - self.config.depth:
            result = self._in_flight.popleft()
            for item in result.items:
                if item.yields and item.attempt == item.sequence.attempt:
                    self._yield_token(item.sequence, step)
        if self._retract:
            self._retract_youngest(step)
        while self._arrived < len(self._requests) and self._requests[self._arrived].arrival_us <= now_us:
            self._waiting.append((self._requests[self._arrived], 0, 0))
            self._arrived += 1
        return result

    def _yield_token(self, sequence: Sequence, step: int) -> None:
        sequence.produced += 1
        self.totals.output_tokens += 1
        if sequence.produced >= sequence.request.output_tokens:
            sequence.share(self.cache)
            self._leave(sequence)
            self.totals.completed += 1
            self._admit_from = step
        else:
            sequence.phase = Phase.DECODE
            self._ready[step % self.config.depth].append(sequence)

    def _retract_youngest(self, step: int) -> None:
        self._retract = False
        if len(self.running) < 2:
            return
        sequence = self.running[-1]
        sequence.share(self.cache)
        self._leave(sequence)
        for group in self._ready:
            if sequence in group:
                group.remove(sequence)
        # Results of the old attempt that are still in flight no longer match.
        sequence.attempt += 1
        entry = (sequence.request, sequence.attempt, sequence.produced)
        at = 0
        while at < len(self._waiting) and self._waiting[at][0].index < entry[0].index:
            at += 1
        self._waiting.insert(at, entry)
        self.totals.retracted += 1
        for short in self.running:
            short.short_since = None if short.short_since is None else step
        # The memory goes to those that stay: no admission until one of them finishes.
        self._admit_from = step + (1 << 30)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence.release(self.cache))

    def _free(self, freed: Mapping[str, Blocks]) -> None:
        for name, blocks in freed.items():
            if len(blocks):
                self._held[name] -= len(blocks)
                self._store.free(name, blocks)

    # ------------------------------------------------------------- 3. schedule

    def schedule(self, step: int) -> Batch:
        """Choose and allocate the batch of this step.

        Returns:
            The batch; its writes must be done before the next step.

        Raises:
            CapacityError: a domain is too small for a single request alone.
        """
        batch = Batch(step)
        group = self._ready[step % self.config.depth]
        group.sort(key=lambda sequence: sequence.request.index)
        prefilling = self._prefilling()
        self._share_and_retire(group + prefilling)
        self._schedule_decodes(batch, group)
        self._schedule_prefill(batch, prefilling)
        if batch.short:
            self._resolve_shortage(batch)
        if self.cache.excess_tokens:
            self._ask_eviction(self.cache.excess_tokens)
        self._in_flight.append(batch)
        return batch

    def _prefilling(self) -> list[Sequence]:
        return [s for s in self.running if s.phase is Phase.PREFILL and s.computed < s.target]

    def _share_and_retire(self, sequences: list[Sequence]) -> None:
        gone = Blocks()
        for sequence in sequences:
            sequence.share(self.cache)
            retired = sequence.retire_window()
            gone.extend(retired.ids, retired.stamps)
        self._free({"swa": gone})

    def _schedule_decodes(self, batch: Batch, group: list[Sequence]) -> None:
        waiting: list[Sequence] = []
        needs = [sequence.needs(1) for sequence in group]
        together: dict[str, int] = {}
        for need in needs:
            for name, count in need.items():
                together[name] = together.get(name, 0) + count
        granted = self._alloc(together) if together else {}
        for sequence, need in zip(group, needs, strict=True):
            if need:
                if granted is not None:
                    own = {name: [granted[name].pop(0) for _ in range(count)] for name, count in need.items()}
                else:
                    # Together they miss: serve the oldest as far as it goes, the others wait in their group.
                    alone = None if batch.short or len(group) == 1 else self._alloc(need)
                    if alone is None:
                        batch.short.append((sequence, need))
                        waiting.append(sequence)
                        continue
                    own = alone
                batch.write(sequence.take(own))
                sequence.short_since = None
            batch.add(Item(sequence, sequence.attempt, 1, True))
            sequence.computed += 1
        self._ready[batch.step % self.config.depth] = waiting

    def _schedule_prefill(self, batch: Batch, prefilling: list[Sequence]) -> None:
        budget = self.config.chunk_tokens
        for sequence in prefilling:
            if budget == 0:
                return
            taken = min(budget, sequence.target - sequence.computed)
            need = sequence.needs(taken)
            granted = self._alloc(need) if need else {}
            if granted is None:
                batch.short.append((sequence, need))
                return
            self._prefill(batch, sequence, granted, taken)
            budget -= taken
        while budget and self._waiting and not batch.short:
            taken = self._admit(batch, budget)
            if taken == 0:
                return
            budget -= taken

    def _admit(self, batch: Batch, budget: int) -> int:
        """Admit the oldest waiting request with its first chunk; returns the tokens scheduled, 0 for none."""
        if len(self.running) >= self._limit or (self.running and batch.step < self._admit_from):
            return 0
        request, attempt, produced = self._waiting[0]
        sequence = Sequence(request, attempt, produced, self.shape)
        full, swa = sequence.enter(self.cache)
        taken = min(budget, sequence.target - sequence.computed)
        need = sequence.needs(taken)
        granted = self._alloc(need) if self._has_room_for(sequence) else None
        if granted is None:
            self.cache.unlock(sequence.path)
            self._admit_from = batch.step + self.config.admission_pause_steps
            if not self.running:
                batch.short.append((sequence, need))
            return 0
        for name, blocks in (("full", full), ("swa", swa)):
            if len(blocks):
                self._store.check(name, blocks)
        self.totals.reused_tokens += sequence.computed
        self._waiting.popleft()
        at = len(self.running)
        while at and self.running[at - 1].request.index > request.index:
            at -= 1
        self.running.insert(at, sequence)
        self._prefill(batch, sequence, granted, taken)
        return taken

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Whether the prompts that were begun and this one fit; asks for eviction where only that makes room.

        Output tokens are not counted: how many there will be is not known to a server, hence retraction.
        """
        block_tokens = self.shape.full_tokens
        if not block_tokens or not self.running:
            return True
        begun = sum(-(-s.target // block_tokens) - len(s.full) for s in self.running if s.phase is Phase.PREFILL)
        own = -(-sequence.target // block_tokens) - len(sequence.full)
        missing_tokens = (begun + own - self._store.headroom("full")) * block_tokens
        if missing_tokens > 0 and self.cache.evictable_tokens:
            self._ask_eviction(min(missing_tokens, self.cache.evictable_tokens))
        return missing_tokens <= 0

    def _prefill(self, batch: Batch, sequence: Sequence, granted: dict[str, list[int]], tokens: int) -> None:
        batch.write(sequence.take(granted))
        batch.add(Item(sequence, sequence.attempt, tokens, sequence.computed + tokens == sequence.target))
        sequence.computed += tokens
        sequence.short_since = None
        batch.prefill_tokens += tokens
        self.totals.prefill_tokens += tokens

    # ------------------------------------------------------------ shortage

    def _alloc(self, need: Mapping[str, int]) -> dict[str, list[int]] | None:
        granted = self._store.alloc(need)
        if granted is None:
            self.totals.misses += 1
            return None
        self.starving = None
        for name, ids in granted.items():
            self._held[name] = self._held.get(name, 0) + len(ids)
        return granted

    def _ask_eviction(self, tokens: int) -> None:
        if not self._evict_asked:
            self._evict_asked = tokens
            self._store.request_eviction(tokens)

    def _resolve_shortage(self, batch: Batch) -> None:
        """Requests that hold blocks, or the only one there is, got none: evict, then retract, then wait for memory."""
        sequence, need = min(batch.short, key=lambda item: item[0].request.index)
        since = sequence.short_since = batch.step if sequence.short_since is None else sequence.short_since
        self.starving = None
        if self.cache.evictable_tokens:
            self._ask_eviction(max(HASH_BLOCK_TOKENS, self.config.chunk_tokens))
            sequence.short_since = batch.step
        elif len(self.running) > 1:
            # The youngest just waits while others progress: they will finish and return their blocks.
            if batch.step - since >= self.config.patience_steps and self.running[-1] is not sequence:
                self._retract = True
        else:
            self._starve(sequence, need)

    def _starve(self, sequence: Sequence, need: Mapping[str, int]) -> None:
        """Nothing of this engine can make room: memory has to come from elsewhere, or the domain is too small."""
        request = sequence.request
        wants = ", ".join(f"{count} {name}" for name, count in need.items())
        self.starving = (
            f"request {request.index} alone ({request.prompt_tokens} prompt and {request.output_tokens} output tokens):"
            f" after {sequence.computed} tokens, holding {len(sequence.full)} full blocks, nothing else running and the"
            f" prefix cache empty, it needs {wants} more block(s)"
        )
        for name, count in need.items():
            held, blocks = self._held.get(name, 0), self._store.blocks(name)
            if held + count > blocks:
                raise CapacityError(
                    f"--capacity is too small for {self.starving}, and of {name} there are {blocks}, {held} of them"
                    " in use; give a larger --capacity"
                )


def _cache_shape(shape: Shape) -> CacheShape:
    if not shape.share_prefixes:
        return CacheShape(0, 0, 0)
    return CacheShape(
        full_blocks=HASH_BLOCK_TOKENS // shape.full_tokens if shape.full_tokens else 0,
        swa_blocks=HASH_BLOCK_TOKENS // shape.swa_tokens if shape.swa_tokens else 0,
        window_tokens=shape.window_tokens,
    )


__all__ = ["Scheduler", "SchedulerConfig"]

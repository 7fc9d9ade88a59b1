"""From a memory capacity to domain sizes, the way the native engine sizes its pools.

A :class:`ModelPlan` is a model before its sizes are known. The engine solves ``tokens * coefficient +
fixed = bytes`` on every rank, takes the minimum over ranks, and derives every pool from the result;
the same arithmetic here gives an elastic run and a static run the same logical capacity.

Source: SGLang 0.5.20, ``model_executor/pool_configurator.py`` and ``KVCacheConfigurator``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..coord.core.errors import ConfigError
from .layout import minimum_bytes
from .specs import DomainSpec, ModelSpec, PoolSpec, align_up, local_pools
from .validate import check_draft_tokens, format_bytes, minimum_blocks

DEFAULT_GRANULE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class DomainPlan:
    """How the engine derives the size of one domain. Exactly one of the last three is set.

    Attributes:
        name: name of the domain.
        block_tokens: tokens of a block; 0 for rows and slots.
        blocks_per_page: B.
        window_tokens: sliding window, 0: none.
        share: tokens here per token of full capacity (1 for the domain that capacity is counted in).
        slots: fixed number of usable rows, whatever the capacity.
        memory_ratio: slots get ``ratio / (1 + ratio)`` of the capacity, before tokens are counted.
    """

    name: str
    block_tokens: int
    blocks_per_page: int = 1
    window_tokens: int = 0
    share: float = 0.0
    slots: int = 0
    memory_ratio: float = 0.0

    def __post_init__(self) -> None:
        rules = (self.share, self.slots, self.memory_ratio)
        if min(rules) < 0 or sum(rule > 0 for rule in rules) != 1 or (self.share > 0) != (self.block_tokens > 0):
            raise ConfigError(
                f"domain {self.name!r}: give a share (with block_tokens), a number of slots, or a memory ratio, all"
                f" positive, and only one of them; got share={self.share}, slots={self.slots},"
                f" memory_ratio={self.memory_ratio}, block_tokens={self.block_tokens}"
            )

    def blocks_for(self, usable: int) -> int:
        """Blocks with the null block, in whole pages; token capacity is rounded down, fixed slots up."""
        blocks = usable + 1
        if self.slots:
            return max(align_up(blocks, self.blocks_per_page), self.floor)
        return blocks // self.blocks_per_page * self.blocks_per_page

    def spec(self, blocks: int) -> DomainSpec:
        """The domain with its size."""
        return DomainSpec(self.name, blocks, self.block_tokens, self.blocks_per_page, self.window_tokens)

    @property
    def floor(self) -> int:
        """Least blocks with which the engine can admit a request."""
        return minimum_blocks(self.block_tokens, self.window_tokens, self.blocks_per_page)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model is spread over ranks and mapped there.

    Attributes:
        pp_size: pipeline stages.
        partition: layers per stage where the operator fixed them.
        granule_bytes: mapping unit of the device.
    """

    pp_size: int
    partition: tuple[int, ...] | None
    granule_bytes: int


class _ShortageError(Exception):
    """A capacity that gives no working sizes; carries the rank that is short."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model whose domains have no sizes yet.

    Attributes:
        name: name of the model.
        num_layers: layers of the target model.
        domains: how each domain is sized.
        pools: buffer families over all layers.
        draft_layers: draft (MTP) stages.
        tp_size: tensor-parallel size that the byte counts are for.
        draft_tokens_max: tokens that the draft's own configuration allows; 0: follows the target.
    """

    name: str
    num_layers: int
    domains: tuple[DomainPlan, ...]
    pools: tuple[PoolSpec, ...]
    draft_layers: int = 0
    tp_size: int = 1
    draft_tokens_max: int = 0

    def with_blocks(self, blocks: Mapping[str, int]) -> ModelSpec:
        """The model with explicit sizes.

        Args:
            blocks: blocks per domain, the null block included; every domain must be named.

        Raises:
            ConfigError: a domain is missing or unknown, or a size does not work.
        """
        names = {plan.name for plan in self.domains}
        if set(blocks) != names:
            raise ConfigError(f"model {self.name!r}: give blocks for exactly {sorted(names)}, got {sorted(blocks)}")
        domains = tuple(plan.spec(blocks[plan.name]) for plan in self.domains)
        spec = ModelSpec(self.name, self.num_layers, domains, self.pools, self.draft_layers, self.tp_size)
        for pool in self.pools:
            if pool.draft and self.draft_tokens_max:
                target = next(domain for domain in domains if domain.name == pool.domain)
                check_draft_tokens(pool.name, self.draft_tokens_max, target.tokens)
        return spec

    def with_tokens(self, tokens: int, slots: Mapping[str, int] | None = None) -> ModelSpec:
        """The model for a number of full tokens, like the engine's ``--max-total-tokens``.

        Args:
            tokens: full tokens; rounded down to whole pages.
            slots: usable slots of domains that are sized by memory (``mamba``).

        Raises:
            ConfigError: the sizes do not work.
        """
        return self.with_blocks({plan.name: self._blocks(plan, tokens, slots or {}) for plan in self.domains})

    def _blocks(self, plan: DomainPlan, tokens: int, slots: Mapping[str, int]) -> int:
        """Blocks of one domain for a number of full tokens."""
        if plan.slots:
            return plan.blocks_for(plan.slots)
        if plan.memory_ratio:
            if plan.name not in slots:
                raise ConfigError(f"domain {plan.name!r} is sized by memory; give slots={{{plan.name!r}: ...}}")
            return plan.blocks_for(slots[plan.name])
        full = tokens // plan.block_tokens * plan.block_tokens
        return plan.blocks_for(int(full * plan.share) // plan.block_tokens)

    def bytes_per_token(self, pools: Sequence[PoolSpec] | None = None) -> float:
        """What the engine charges a full token.

        Draft stages count one by one. Page padding is not in it; the engine leaves it out, too.

        Args:
            pools: pools of one stage; None: the whole model.
        """
        plans = {plan.name: plan for plan in self.domains}
        return sum(
            pool.lanes * pool.charged_bytes / plans[pool.domain].block_tokens * plans[pool.domain].share
            for pool in (self.pools if pools is None else pools)
            if plans[pool.domain].share
        )

    def with_capacity(
        self,
        capacity_bytes: int | Sequence[int],
        pp_size: int = 1,
        *,
        partition: Sequence[int] | None = None,
        tokens_max: int = 0,
        granule_bytes: int = DEFAULT_GRANULE_BYTES,
    ) -> ModelSpec:
        """Size all domains from the memory that each rank may use.

        Args:
            capacity_bytes: bytes per rank: one number for all, or one per world rank
                (``pp_rank * tp_size + tp_rank``). The rank with the least room decides.
            pp_size: pipeline stages.
            partition: layers per stage where the operator fixed them.
            tokens_max: the operator's cap on full tokens; 0: none.
            granule_bytes: mapping unit of the device.

        Returns:
            One model for all ranks, so that no rank can hand out an id that another does not have.

        Raises:
            ConfigError: a rank could serve nothing; names the capacity, the rank's need, and the minimum.
        """
        world = pp_size * self.tp_size
        capacities = [capacity_bytes] * world if isinstance(capacity_bytes, int) else list(capacity_bytes)
        if len(capacities) != world:
            raise ConfigError(f"{len(capacities)} capacities for {world} ranks (pp {pp_size} x tp {self.tp_size})")
        if min(capacities) < 1 or tokens_max < 0:
            raise ConfigError(f"capacities {capacities} must be positive and tokens_max={tokens_max} at least 0")
        cut = Cut(pp_size, None if partition is None else tuple(partition), granule_bytes)
        try:
            return self._solve(capacities, cut, tokens_max)
        except _ShortageError as short:
            minimum = self._least_capacity(world, cut)
            raise ConfigError(
                f"capacity {format_bytes(capacities[short.rank])} is too small for rank {short.rank}: {short.reason};"
                f" the minimum per rank is {format_bytes(minimum)}"
            ) from None

    def _solve(self, capacities: Sequence[int], cut: Cut, tokens_max: int) -> ModelSpec:
        stages = [local_pools(self.pools, self.num_layers, r, cut.pp_size, cut.partition) for r in range(cut.pp_size)]
        slots = self._memory_slots(min(capacities), stages)
        charged = self._slot_charge(slots, stages)
        tokens, short_rank = self._least_tokens(capacities, stages, charged)
        self._require_floors(tokens, slots, short_rank)
        spec = self.with_tokens(min(tokens, tokens_max) if tokens_max else tokens, slots)
        needs = [minimum_bytes(stage, cut.granule_bytes) for stage in spec.stages(cut.pp_size, cut.partition)]
        for rank, capacity in enumerate(capacities):
            needed = needs[rank // self.tp_size]
            if capacity < needed:
                reason = f"the null page and one page of each domain need {format_bytes(needed)} there"
                raise _ShortageError(rank, reason)
        return spec

    def _memory_slots(self, capacity: int, stages: Sequence[tuple[PoolSpec, ...]]) -> dict[str, int]:
        """Usable slots of the domains that are sized by memory; the widest stage decides, as in the engine."""
        slots: dict[str, int] = {}
        for plan in self.domains:
            if plan.memory_ratio:
                per_slot = _slot_bytes(plan.name, stages)
                budget = capacity * plan.memory_ratio / (1 + plan.memory_ratio)
                slots[plan.name] = max(plan.blocks_for(int(budget // per_slot) - 1) - 1, 0)
        return slots

    def _slot_charge(self, slots: Mapping[str, int], stages: Sequence[tuple[PoolSpec, ...]]) -> int:
        """Bytes that memory-sized slots take from every rank before tokens are counted."""
        return sum((count + 1) * _slot_bytes(name, stages) for name, count in slots.items())

    def _least_tokens(
        self, capacities: Sequence[int], stages: Sequence[tuple[PoolSpec, ...]], charged: int
    ) -> tuple[int, int]:
        """Full tokens that every rank can hold, and the rank that decides."""
        fixed_blocks = {plan.name: plan.blocks_for(plan.slots) for plan in self.domains if plan.slots}
        least: tuple[int, int] | None = None
        for rank, capacity in enumerate(capacities):
            pools = stages[rank // self.tp_size]
            per_token = self.bytes_per_token(pools)
            fixed = charged + sum(p.static_bytes(fixed_blocks[p.domain]) for p in pools if p.domain in fixed_blocks)
            tokens = int(max(capacity - fixed, 0) / per_token) if per_token else None
            if tokens is not None and (least is None or tokens < least[0]):
                least = (tokens, rank)
        if least is None:
            raise ConfigError(f"model {self.name!r}: no pool is charged by the token; size it with with_blocks()")
        return least

    def _require_floors(self, tokens: int, slots: Mapping[str, int], rank: int) -> None:
        for plan in self.domains:
            blocks = self._blocks(plan, tokens, slots)
            if blocks < plan.floor:
                unit = f"pages of {plan.block_tokens} tokens" if plan.block_tokens else "slots"
                have, need = max(blocks - 1, 0), plan.floor - 1
                raise _ShortageError(rank, f"domain {plan.name!r} gets {have} usable {unit} there and needs {need}")

    def _least_capacity(self, world: int, cut: Cut) -> int:
        """Least capacity per rank, in whole granules, for which :meth:`_solve` succeeds."""

        def fits(granules: int) -> bool:
            try:
                self._solve([granules * cut.granule_bytes] * world, cut, 0)
            except _ShortageError:
                return False
            return True

        enough = next((1 << power for power in range(48) if fits(1 << power)), 1 << 48)
        too_small = enough // 2
        while enough - too_small > 1:
            middle = (enough + too_small) // 2
            if fits(middle):
                enough = middle
            else:
                too_small = middle
        return enough * cut.granule_bytes


def _slot_bytes(domain: str, stages: Sequence[tuple[PoolSpec, ...]]) -> int:
    """Bytes of one slot on the stage that holds the most layers of the domain's pools."""
    return max(sum(p.lanes * p.block_bytes for p in pools if p.domain == domain) for pools in stages)

"""What a schedule consists of: sizes, speeds, probabilities and faults, all from one seed (swarm)."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

from kvcached_dist.coord.core.effects import WorkKind
from kvcached_dist.coord.core.policy import Policy
from kvcached_dist.coord.core.types import CauseKind

from .clock import MS, SECOND
from .workload import Shape

if TYPE_CHECKING:
    from .host import Host

PHASES: Final = ("quiet", "reserving", "mapping", "publishing", "draining", "unmapping", "restoring", "releasing")
"""Where the leader's transaction stands; *publishing*: decided, and its entry waits for the next mark."""

_ASKING: Final = ("reserving", "mapping", "unmapping", "restoring", "releasing")

CELLS: Final[dict[str, tuple[str, ...]]] = {
    # driver faults
    "create_exhausted": ("reserving",),
    "create_driver": ("reserving",),
    "no_memory": ("reserving",),
    "admission": ("reserving",),
    "map_fail": ("mapping",),
    "unmap_fail": ("unmapping",),
    "restore_fail": ("restoring",),
    "release_fail": ("releasing",),
    "slow_work": _ASKING,
    # messages
    "drop_answer": (*_ASKING, "draining"),
    "drop_state": _ASKING,
    "duplicate": PHASES,
    "old_epoch": PHASES,
    "clog": PHASES,
    "half_clog": PHASES,
    "swizzle": PHASES,
    "link_lost": PHASES,
    # processes
    "kill": PHASES,
    "kill_leader": PHASES,
    "rejoin": PHASES,
    "stop": PHASES,
    "stop_long": PHASES,
    "stop_leader": PHASES,
    "stop_leader_long": PHASES,
    "late_stage": PHASES,
    "bye": PHASES,
    # the engine
    "diverge": PHASES,
}
"""Fault kinds and the phases in which they can strike: the cells of the table of hits."""

CAUSE_OF: Final = {
    "create_exhausted": CauseKind.EXHAUSTED,
    "create_driver": CauseKind.DRIVER,
    "map_fail": CauseKind.DRIVER,
    "unmap_fail": CauseKind.DRIVER,
    "restore_fail": CauseKind.DRIVER,
    "release_fail": CauseKind.DRIVER,
}

WORK_OF: Final = {
    "reserving": WorkKind.RESERVE,
    "mapping": WorkKind.MAP,
    "unmapping": WorkKind.UNMAP,
    "restoring": WorkKind.RESTORE,
    "releasing": WorkKind.RELEASE,
}

ANSWERS_OF: Final = {
    "reserving": ("RESERVED", "REFUSED"),
    "mapping": ("MAPPED", "MAP_FAILED"),
    "draining": ("DRAINED",),
    "unmapping": ("UNMAPPED", "UNMAP_FAILED"),
    "restoring": ("RESTORED", "RESTORE_FAILED"),
    "releasing": ("RELEASED", "RELEASE_FAILED"),
}

ARMED: Final = (*CAUSE_OF, "slow_work", "drop_answer", "drop_state")
"""Kinds that wait for the n-th driver work or answer of their phase on their rank; the others strike when the
leader has entered their phase for the n-th time."""

FATAL: Final = frozenset(
    {"rejoin", "restore_fail", "kill", "kill_leader", "stop_long", "stop_leader_long", "link_lost", "bye", "diverge"}
)
"""Kinds that end the coordinator; rare in a schedule, so that most reach the liveness phase."""


@dataclass(slots=True)
class Fault:
    """One planned fault.

    Attributes:
        kind: key of :data:`CELLS`.
        phase: where it strikes.
        rank: on which rank.
        nth: at the n-th opportunity.
        amount: how long (microseconds), at which extent, or how many replies are lost.
    """

    kind: str
    phase: str
    rank: int
    nth: int = 1
    amount: int = 0

    def __str__(self) -> str:
        return f"{self.kind}@{self.phase}(rank={self.rank}, nth={self.nth}, amount={self.amount})"


DIRECTED_SHAPE: Final = Shape(
    pages=(24,),
    blocks_per_page=(2,),
    steps=40,
    ops=1.5,
    grab=0.3,
    both=0.5,
    retry=0.5,
    hold=5,
    busy_steps=14,
    hint=0.1,
)
"""Workload of the directed schedules: grows, and gives back in idle spells."""


@dataclass(slots=True)
class Plan:
    """One schedule. Everything is drawn from ``seed``; faults can be left out by number when a failure is shrunk.

    Attributes: sizes and times are microseconds unless a name says otherwise.
    """

    seed: int
    tp: int = 2
    pp: int = 1
    shape: Shape = DIRECTED_SHAPE
    ordered: bool = False
    beat: int = 100 * MS
    lease: int = 2 * SECOND
    growth_deadline: int = 300 * MS
    drain_deadline: int = 600 * MS
    policy: Policy = field(default_factory=Policy)
    tick: int = 25 * MS
    turn_poll: int = MS
    delay: tuple[int, int] = (50, 300)
    work: tuple[int, int] = (50, 1000)
    batch: tuple[int, int] = (500, 4000)
    step_min: int = MS
    step: tuple[int, int] = (1 * MS, 6 * MS)
    work_is_early: bool = True
    window: int = 2
    lag: int = 0
    shared_cards: bool = False
    card_pages: float = 1.5
    evict: float = 0.0
    sort_interval: int = 256
    clock_offset: int = 0
    faults: list[Fault] = field(default_factory=list)
    chatter: dict[str, float] = field(default_factory=dict)
    """Probability per leader tick of faults that strike anywhere: duplicate, old_epoch, clog."""
    random: Random = field(default_factory=Random)
    directed: str = ""

    @property
    def ranks(self) -> int:
        """World size."""
        return self.tp * self.pp

    # ------------------------------------------------------------------ draws while it runs

    def work_delay(self, host: Host) -> int:
        """Duration of a batch of driver calls."""
        return self.random.randint(*self.work)

    def step_time(self, host: Host, calm: bool) -> int:
        """Pause between two engine steps of a rank."""
        if host.leader is None:
            return self.step_min // 4
        return 20 * MS if calm else self.random.randint(*self.step)

    def batch_end(self, host: Host) -> int:
        """When the batch that is launched now has finished: after all earlier ones."""
        host.device_free_at = max(host.device_free_at, host.loop.now) + self.random.randint(*self.batch)
        return host.device_free_at

    def wait_bound(self, host: Host) -> int:
        """Longest wait of an engine call (L1)."""
        if host.leader is not None:
            return self.growth_deadline + 4 * self.policy.query_interval + 2 * self.tick
        return self.lease + 2 * self.beat

    def describe(self) -> str:
        """One line for people."""
        shape = self.shape
        return (
            f"seed={self.seed} tp={self.tp} pp={self.pp} pages={shape.pages} blocks_per_page={shape.blocks_per_page}"
            f" steps={shape.steps} ordered={self.ordered} shared_cards={self.shared_cards}"
            f" card_pages={self.card_pages:.2f} window={self.window} lag={self.lag}"
            + (f" directed={self.directed}" if self.directed else "")
        )


_WORLDS: Final = ((2, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3), (4, 1), (1, 1))
_LARGE_WORLDS: Final = ((4, 2), (2, 4), (8, 1), (4, 4), (8, 2), (1, 8))


def draw(seed: int) -> Plan:
    """A random schedule, its probabilities included."""
    random = Random(seed)
    tp, pp = random.choice(_LARGE_WORLDS if random.random() < 0.02 else _WORLDS)
    large = tp * pp > 4
    domains = random.choice((1, 1, 2, 3))
    pages = tuple(random.choice((6, 12, 24, 40)) for _ in range(domains))
    shape = Shape(
        pages=pages,
        blocks_per_page=tuple(random.choice((1, 1, 2, 4)) for _ in range(domains)),
        steps=random.randint(10, 20) if large else random.randint(20, 44),
        ops=random.choice((0.5, 1.0, 2.0)),
        grab=random.choice((0.1, 0.25, 0.6)),
        both=random.choice((0.2, 0.8)),
        retry=random.choice((0.0, 0.5, 1.0)),
        hold=random.choice((2, 4, 8)),
        busy_steps=random.choice((0, 6, 10, 16)),
        hint=random.choice((0.0, 0.1, 0.4)),
    )
    slow_net = random.random() < 0.2
    deadline = 300 * MS
    low = random.choice((0, 1, 2, 5))
    # Chosen apart, so that a seed still means the same faults.
    quantities = Random(f"quantities {seed}")
    policy = Policy(
        growth_deadline=deadline,
        query_interval=100 * MS,
        lease=2 * SECOND,
        drain_deadline=random.choice((60 * MS, 600 * MS)),
        map_retries=random.choice((0, 1, 2)),
        run_pages_min=random.choice((1, 1, 2)),
        run_pages_max=random.choice((1, 4, 64)),
        run_share=quantities.choice((0, 2, 16)),
        demand_window=quantities.choice((0, 20 * MS, 2 * SECOND)),
        reserved_pages_min=low,
        reserved_pages_max=low + random.choice((1, 3, 8)),
        reclaim_interval_steps=random.choice((1, 3, 16)),
        backoff_min=random.choice((1 * MS, 20 * MS)),
        backoff_max=80 * MS,
        rejoin=random.random() < 0.3,
        seed=random.randrange(1 << 30),
    )
    plan = Plan(
        seed=seed,
        tp=tp,
        pp=pp,
        shape=shape,
        ordered=random.random() < 0.5,
        drain_deadline=policy.drain_deadline,
        policy=policy,
        delay=(500, 6 * MS) if slow_net else (20, random.choice((100, 1500))),
        work=random.choice(((20, 200), (100, 2 * MS), (MS, 20 * MS))),
        batch=random.choice(((100, 1000), (MS, 8 * MS))),
        step=random.choice(((MS, 3 * MS), (MS, 12 * MS), (10 * MS, 40 * MS))),
        work_is_early=random.random() < 0.5,
        window=random.randint(1, 3) + 2 * pp,
        lag=random.randint(0, 2) if pp > 1 else 0,
        shared_cards=random.random() < 0.25,
        card_pages=random.choice((0.4, 0.8, 1.5)),
        evict=random.choice((0.0, 0.0, 0.1)),
        sort_interval=random.choice((2, 8, 256)),
        clock_offset=random.choice((0, -2 * SECOND, 1 << 40)),
        random=random,
    )
    plan.faults = _draw_faults(plan, random)
    for kind in ("duplicate", "old_epoch", "clog", "limit"):
        plan.chatter[kind] = random.choice((0.0, 0.0, 0.02, 0.1))
    return plan


def _draw_faults(plan: Plan, random: Random) -> list[Fault]:
    """Faults of random kinds at random phases; how many, and how many may be fatal, is drawn too."""
    fatal_share = 0.3 if plan.policy.rejoin else random.choice((0.0, 0.0, 0.15))
    mild = [kind for kind in CELLS if kind not in FATAL]
    fatal = sorted(FATAL - {"rejoin"}) + ["rejoin"] * (8 * plan.policy.rejoin)
    faults = []
    for _ in range(random.choice((0, 1, 3, 6, 10))):
        kind = random.choice(fatal if random.random() < fatal_share else mild)
        faults.append(fault_at(plan, kind, random.choice(CELLS[kind]), random, nth=random.choice((1, 1, 2, 3, 5))))
    return faults


def fault_at(plan: Plan, kind: str, phase: str, random: Random, nth: int = 1) -> Fault:
    """A fault with a rank and an amount that fit its kind."""
    followers = range(1, plan.ranks)
    rank = 0 if kind.endswith(("_leader", "leader_long")) or not followers else random.choice(followers)
    if kind in ARMED and random.random() < 0.3:
        rank = 0
    amounts = {
        "slow_work": random.choice((50 * MS, 500 * MS)),
        "drop_state": random.choice((1, 1, 1, 2)),
        "clog": random.randint(5 * MS, 700 * MS),
        "half_clog": random.randint(5 * MS, 250 * MS),
        "swizzle": random.randint(5 * MS, 400 * MS),
        "stop": random.randint(10 * MS, 1600 * MS),
        "stop_leader": random.randint(10 * MS, 1200 * MS),
        "stop_long": plan.lease + random.randint(200 * MS, SECOND),
        "stop_leader_long": plan.lease + random.randint(200 * MS, SECOND),
        "late_stage": random.randint(10 * MS, 200 * MS),
        "admission": random.randint(300 * MS, 600 * MS),
        "no_memory": random.randint(20 * MS, 200 * MS),
    }
    return Fault(kind, phase, rank, nth, amounts.get(kind, random.randint(0, 3)))


def directed() -> list[Plan]:
    """One schedule per cell of the table; they run first."""
    plans: list[Plan] = []
    for kind, phases in CELLS.items():
        for phase in phases:
            number = len(plans)
            random = Random(number)
            plan = Plan(seed=number, tp=2, pp=2, window=5, lag=1, random=random, directed=f"{kind}@{phase}")
            plan.policy = Policy(
                growth_deadline=plan.growth_deadline,
                query_interval=100 * MS,
                lease=plan.lease,
                drain_deadline=plan.drain_deadline,
                reserved_pages_min=1,
                reserved_pages_max=2,
                reclaim_interval_steps=4,
                backoff_min=5 * MS,
                backoff_max=80 * MS,
                rejoin=kind == "rejoin",
            )
            if phase == "restoring":
                plan.faults.append(Fault("unmap_fail", "unmapping", 1, 1, 1))
            plan.faults.append(fault_at(plan, kind, phase, random))
            plans.append(plan)
    return plans

r"""What is elastic in this scheduler process, from the agreement of all ranks to the end of the process.

::

    UNDECIDED --agree--> AGREED --start--> STARTED --bind--> BOUND --attach--> SERVING
        \__________________\__ NATIVE, with one line that says why

Every arrow is taken by all ranks together: each follows an exchange in which a single no keeps the native pools. Once
buffers are elastic there is no way back: what is missing then ends the start.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch

from .. import _native
from ..config import Config
from ..coord.core.entries import Evict, Growable, Publish, Retire, Unretire
from ..coord.core.errors import ConfigError, InvariantViolation
from ..faults import FaultPlan
from ..snapshot import unique_name
from ..stream import EngineList, StreamCoordinator
from . import capacity, engine, specs
from .cache_budget import CacheBudget
from .fence import StreamFence
from .lists import TokenList
from .native import EXIT_PRIORITY, NativePools
from .needs import Needs
from .offer import Offer, common_draft, offer, refusals
from .parked import ParkedChunk
from .request_table import RequestTable
from .reservations import Reservations
from .rows import RowList
from .watch import Watch

if TYPE_CHECKING:
    from ..agent import Fence
    from ..coord.core.types import Run
    from .drafts import Draft

_log = logging.getLogger("kvcached_dist.sglang")


class Phase(Enum):
    """How far this process has come."""

    UNDECIDED = "undecided"
    NATIVE = "native"
    AGREED = "agreed"
    STARTED = "started"
    BOUND = "bound"
    SERVING = "serving"


class Mark:
    """A mark on the engine's request broadcast. Unknown to the engine, taken out before it looks.

    Attributes:
        frames: what rank 0 decided, as the library's own frames.
    """

    __slots__ = ("frames",)

    def __init__(self, frames: tuple[bytes, ...]) -> None:
        self.frames = frames


class Runtime:
    """State of one scheduler process.

    Args:
        config: settings, read once.
        missing: places of the engine that should be hooked and are not.

    Threads: the scheduler thread.
    """

    def __init__(self, config: Config, missing: Callable[[], list[str]]) -> None:
        self.config = config
        self.phase = Phase.UNDECIDED
        self.reason = ""
        self.coordinator: StreamCoordinator | None = None
        self.lists: dict[str, TokenList | RowList] = {}
        self.parked = ParkedChunk(config.parked_s)
        self.evicted_tokens = 0
        self._missing = missing
        self._cache_budget = CacheBudget(config)
        self.sizes: Any = None
        """The engine's derived sizes, as agreed."""
        self.draft: Draft | None = None
        """The draft model whose pool is backed with the target's, as agreed."""
        self._configurator: Any = None
        self._scheduler: Any = None
        self._needs: Needs | None = None
        self._takeover: specs.Takeover | None = None
        self._request_table = RequestTable()
        self._reservations: Reservations | None = None
        self._native: NativePools | None = None
        self._name = ""

    @property
    def elastic(self) -> bool:
        """Whether the engine runs on elastic pools."""
        return self.phase in (Phase.BOUND, Phase.SERVING)

    @property
    def forward_stream(self) -> Any:
        """Stream of the engine's batches on CUDA, ``None`` elsewhere; once agreed."""
        return self._configurator.forward_stream if self._configurator.device == "cuda" else None

    @property
    def parallel(self) -> engine.Group:
        """The ranks that share this rank's queue of requests and block ids, once agreed."""
        return engine.group_of(engine.parallel_of(self._configurator))

    @property
    def configurator(self) -> Any:
        """The engine's ``KVCacheConfigurator``, once agreed."""
        return self._configurator

    @property
    def model_layers(self) -> int:
        """Layers of the whole model, once agreed."""
        return int(self._configurator.model_config.num_hidden_layers)

    # ------------------------------------------------------------------ start

    def starts(self, scheduler: Any) -> None:
        """The engine's scheduler is about to make its workers: those of a draft model exist before any pool does."""
        self._scheduler = scheduler

    def agree(self, configurator: Any, sizes: Any) -> Any | None:
        """Collective: whether this engine's pools become elastic, and how many tokens any rank could ever hold.

        Args:
            configurator: the engine's ``KVCacheConfigurator``, about to build pools.
            sizes: the sizes that it derived.

        Returns:
            Sizes cut down to what every rank's device could hold, or ``None`` where they stay.

        Raises:
            ConfigError: with ``KVCACHED_REQUIRE``, the pools would stay native.
            WaitTimeout: a rank said nothing, as one does in which this plugin is not registered.
        """
        if configurator.is_draft_worker or self.phase is not Phase.UNDECIDED:
            return None
        self._configurator = configurator
        mine = offer(configurator, sizes, self.config, self._missing(), self._scheduler)
        offers: list[Offer] = self._gather(dataclasses.replace(mine, name=unique_name()), "offer")
        self._name = self.config.ipc_name or offers[0].name
        refused = refusals(offers)
        if refused:
            self.stay_native(refused)
            return None
        draft, native_draft = common_draft(offers)
        held = [made.held(draft) for made in offers]
        least = min(held)
        smaller = None
        if least < sizes.max_total_num_tokens:
            try:
                smaller = capacity.cut(sizes, least, configurator)
            except ConfigError as error:
                self.stay_native(str(error))
                return None
        self.phase = Phase.AGREED
        self.sizes, self.draft = smaller or sizes, draft
        if native_draft:
            _log.warning("event=pool rank=%d name=draft elastic=no why=%r", self.parallel.world.rank, native_draft)
        if smaller is None:
            return None
        _log.warning(
            "event=capacity_cut tokens=%d from=%d why='rank %d cannot hold more beside its reserve'",
            least, sizes.max_total_num_tokens, held.index(least),
        )  # fmt: skip
        return smaller

    def start(self, describe: Callable[[int], specs.Takeover]) -> specs.Takeover | None:
        """Collective: pools of this stage, their null pages backed on all ranks; ``None``: they stay native.

        Args:
            describe: what is to be taken over, for a granule in bytes; ``ConfigError`` where it cannot be.

        Raises:
            ConfigError: with ``KVCACHED_REQUIRE``, the pools would stay native.
            GroupFailed, WaitTimeout: a rank failed or did not come.
        """
        configurator = self._configurator
        takeover: specs.Takeover | None = None
        try:
            host = configurator.device == "cpu"
            takeover = describe(self.config.host_granule_bytes if host else capacity.CUDA_GRANULE_BYTES)
            reason = ""
        except ConfigError as error:
            reason = str(error)
        refused = [f"rank {rank}: {why}" for rank, why in enumerate(self._gather(reason, "takeover")) if why]
        if refused or takeover is None:
            self.stay_native("; ".join(refused))
            return None
        group = self.parallel
        store, session = engine.open_store(
            engine.store_host(configurator.server_args), group, self.config.start_timeout_s
        )
        world = group.world
        self._takeover = takeover
        self.coordinator = StreamCoordinator.start(
            world=world,
            stage=takeover.stage,
            device=self._device(configurator),
            config=dataclasses.replace(self.config, ipc_name=group.name(self.config.ipc_name)),
            make_lists=self._make_lists,
            store=store,
            session=session,
            faults=FaultPlan.parse(self.config.faults.split(";"), world.size) if self.config.faults else None,
            fence=self._fence(configurator),
        )
        self.phase = Phase.STARTED
        return takeover

    def _make_lists(self, blocks: Sequence[int], per_page: Sequence[int]) -> list[EngineList]:
        takeover = self._taken()
        for domain, count, pages in zip(takeover.stage.domains, blocks, per_page, strict=True):
            kind = RowList if domain.name == specs.ROWS else TokenList
            self.lists[domain.name] = kind(domain.name, count, pages, takeover.ids[domain.name])
        return list(self.lists.values())

    def _device(self, configurator: Any) -> _native.Device:
        if configurator.device == "cuda":
            return _native.CudaDevice(configurator.gpu_id)
        config = self.config
        return _native.HostDevice(
            config.host_capacity_bytes, config.host_granule_bytes, card_file=config.host_card_file
        )  # fmt: skip

    def _fence(self, configurator: Any) -> Callable[[], Fence] | None:
        if configurator.device != "cuda":
            return None
        return lambda: StreamFence(
            (self.forward_stream, torch.cuda.current_stream()),
            [check for known in self.lists.values() for check in known.take_checks()],
        )

    def bind(self, pools: Any) -> None:
        """The engine has built its allocators: their lists hold published ids only from now on."""
        if self.phase is Phase.AGREED:
            self.stay_native(f"rank {engine.world_rank()}: the engine built a {type(pools.token_to_kv_pool).__name__}")
        if self._native is not None:
            self._native.add(pools)
        if self.phase is not Phase.STARTED:
            return
        allocator = pools.token_to_kv_pool_allocator
        owners = {
            specs.FULL: getattr(allocator, "full_attn_allocator", allocator),
            specs.SWA: getattr(allocator, "swa_attn_allocator", None),
            specs.ROWS: pools.req_to_token_pool,
        }
        for name, known in self.lists.items():
            setattr(owners[name], LIST_ATTRIBUTE, known)
            known.bind(owners[name])
        self.phase = Phase.BOUND
        self.reserve(pools)

    def reserve(self, pools: Any, prefix: str = "") -> None:
        """Account for what the engine has built for itself beside the elastic pools; tell of native ones.

        Args:
            pools: what the engine's ``_init_pools`` returned.
            prefix: in front of the names of its pools.
        """
        if self._native is not None:
            self._native.add(pools, prefix)
        if not self.elastic or not self.config.sglang_dsv4_runtime_reservation:
            return
        if self._reservations is None:
            coordinator = self._coordinator()
            native, indices = coordinator.backing.native, range(len(coordinator.stage.pools))
            self._reservations = Reservations(
                coordinator.register_runtime_pool, self._configurator.device,
                frozenset(native.base(index) for index in indices), rank=coordinator.world.rank,
            )  # fmt: skip
        self._reservations.add(pools, prefix)

    def attach(self, scheduler: Any) -> None:
        """Collective: the scheduler exists on all ranks and every hook is in force; marks may flow.

        Raises:
            ConfigError: buffers are elastic and something that must be hooked is not.
            WaitTimeout: a rank did not come.
        """
        if self.phase is Phase.NATIVE:
            return
        missing = self._missing()
        if self.phase is Phase.STARTED:
            # Its buffers are elastic and its free lists hold ids without memory: too late for native pools.
            what = ", ".join(missing) or "KVCacheConfigurator._init_pools, or what the engine calls instead"
            raise ConfigError(
                f"rank {self.parallel.world.rank}: the engine has elastic buffers, but its free lists were never taken"
                f" over (phase {self.phase.value}); not hooked: {what}. Run kvcached-dist sglang in this environment,"
                " and start without ENABLE_KVCACHED until it says that every hook is in force"
            )
        if self.phase is not Phase.BOUND:
            self.stay_native(f"the engine built its pools elsewhere (phase {self.phase.value})")
            return
        said = enumerate(self._gather(missing, "attach"))
        late = [f"rank {rank}: {', '.join(names)}" for rank, names in said if names]
        if late:
            raise ConfigError(f"hooks went out of force while the engine started ({'; '.join(late)})")
        self._scheduler = scheduler
        self.phase = Phase.SERVING
        coordinator = self._coordinator()
        Watch(coordinator).start()
        # A scheduler leaves through multiprocessing, which runs its own finalizers and not those of atexit. The
        # others are told, so that an orderly end is not taken for a death.
        Finalize(None, coordinator.close, exitpriority=EXIT_PRIORITY)
        self._tell_elastic(coordinator)

    @staticmethod
    def _tell_elastic(coordinator: StreamCoordinator) -> None:
        """One line for each pool."""
        for pool in coordinator.stage.pools:
            state = coordinator.snapshot()["pools"][pool.name]
            _log.info(
                "event=pool rank=%d name=%s elastic=yes domain=%s layers=%d virtual_bytes=%d mapped_bytes=%d"
                " native_bytes=%d", coordinator.world.rank, pool.name, pool.domain, len(pool.layers),
                state["virtual_bytes"], state["mapped_bytes"], state["static_bytes"],
            )  # fmt: skip

    def _gather(self, value: object, item: str) -> list[Any]:
        return engine.gather(value, item, self.config.start_timeout_s)

    def stay_native(self, reason: str) -> None:
        """The engine's own pools stay; one line says why.

        Raises:
            ConfigError: with ``KVCACHED_REQUIRE``.
        """
        self.phase = Phase.NATIVE
        self.reason = reason
        if self.config.require:
            raise ConfigError(f"KVCACHED_REQUIRE=1, but the pools would stay native: {reason}")
        _log.warning("event=pool rank=%d name=all elastic=no why=%r", engine.world_rank(), reason)
        if self._configurator is not None:
            self._native = NativePools(self.config, self._name, reason, self._configurator)

    # ------------------------------------------------------------------ the stream

    def decide(self, pulled: Sequence[Any]) -> Mark | None:
        """On rank 0, with the pulled requests in hand and the broadcast about to follow."""
        coordinator = self._coordinator()
        if not coordinator.leads:
            return None
        if self._needs is None:
            self._needs = Needs(self._scheduler)
        needs = self._needs
        idle = needs.idle(pulled)
        surplus = self._cache_budget.surplus(
            coordinator, self._scheduler.tree_cache, self.lists[specs.FULL], idle=idle
        )  # fmt: skip
        if surplus:
            coordinator.evict(surplus)
        pages, rows = needs.pages_and_rows(pulled)
        wanted = {name: rows if name == specs.ROWS else pages for name in self.lists}
        if rows and (known := self.lists.get(specs.SWA)) is not None:
            free = int(self._scheduler.req_to_token_pool.available_size()) + self.unpublished_tokens(specs.ROWS)
            wanted[specs.SWA] = min(pages + needs.window_pages(rows, free), known.book.ids)
        decoding = needs.running_pages()
        running = {name: min(decoding, count) for name, count in wanted.items() if name != specs.ROWS}
        frames = coordinator.decide(wanted, idle=idle, running=running)
        return Mark(frames) if frames else None

    def to_broadcast(self, pulled: Sequence[Any]) -> list[Any]:
        """On rank 0: what this library puts into the broadcast that follows at once.

        Args:
            pulled: the requests in hand.
        """
        mark = self.decide(pulled)
        if self._needs is None:
            return []
        aborts = self.parked.aborts(self._scheduler.chunked_req, self._needs.nothing_runs)
        return aborts if mark is None else [*aborts, mark]

    def queued(self, request: Any) -> None:
        """The engine has put a request into its queue; only rank 0 needs to know."""
        if self._needs is not None:
            self._needs.queued(request)

    def apply(self, mark: Mark) -> None:
        """On every rank, before anything else of the same list is handled."""
        entries = self._coordinator().apply(mark.frames)
        if any(isinstance(entry, Publish | Unretire | Growable) for entry in entries):
            self._try_refused_again()
        for entry in entries:
            if isinstance(entry, Evict):
                self.evicted_tokens += engine.evict(self._scheduler.tree_cache, entry.tokens)
        retired = [run for entry in entries if isinstance(entry, Retire) and not entry.retained for run in entry.runs]
        if retired:
            self._forget_ids(retired)

    def admit(self, owner: Any, ids: Any) -> Any:
        """Ids or rows that the engine is about to put into a free list; what may enter.

        Args:
            owner: the engine's allocator or its rows, ours or not.
            ids: as the owner keeps them.

        Raises:
            GroupFailed: one of them is not published, and that is known at once (on the host).
        """
        known = getattr(owner, LIST_ATTRIBUTE, None)
        if known is None:
            return ids
        try:
            return known.admit(ids)
        except InvariantViolation as violation:
            self._coordinator().broken(violation)

    def _try_refused_again(self) -> None:
        """A refused batch latches; there is more now, for every micro-batch."""
        scheduler = self._scheduler
        for batch in (scheduler.running_batch, *(getattr(scheduler, "running_mbs", None) or ())):
            batch.batch_is_full = False

    def handed_out(self, pool: Any, rows: Sequence[int]) -> None:
        """The engine has taken request rows from its list.

        Args:
            pool: the engine's rows, ours or not.
            rows: at least one.
        """
        known = getattr(pool, LIST_ATTRIBUTE, None)
        if known is not None:
            known.handed_out(rows)
        self._request_table.handed_out(rows)

    def _forget_ids(self, retired: Sequence[Run]) -> None:
        """No stale row may name an id that is gone."""
        stage = self._coordinator().stage
        index = stage.domain_index(specs.FULL)
        domain = stage.domains[index]
        self._request_table.forget(
            self._scheduler.req_to_token_pool.req_to_token,
            [run for run in retired if run.domain == index],
            domain.pages,
            domain.blocks_per_page * self._taken().block_tokens(specs.FULL),
        )

    # ------------------------------------------------------------------ views, in tokens (rows: in rows)

    def growable_tokens(self, domain: str = specs.FULL) -> int:
        """What every rank could still back, never more than the engine's allocator has ids for."""
        known = self.lists.get(domain)
        if known is None:
            return 0
        growable = self._coordinator().domains[domain].growable
        return min(growable, known.missing) * self._taken().block_tokens(domain)

    def published_free_tokens(self, domain: str = specs.FULL) -> int:
        """What a step can allocate now without evicting anything."""
        return self.lists[domain].available() * self._taken().block_tokens(domain)

    def unpublished_tokens(self, domain: str = specs.FULL) -> int:
        """What exists for the engine's accounts and is not backed."""
        known = self.lists.get(domain)
        return 0 if known is None else known.missing * self._taken().block_tokens(domain)

    def _taken(self) -> specs.Takeover:
        if self._takeover is None:
            raise ConfigError(f"nothing is taken over in phase {self.phase.value}")
        return self._takeover

    def _coordinator(self) -> StreamCoordinator:
        if self.coordinator is None:
            raise ConfigError(f"no coordinator in phase {self.phase.value}")
        return self.coordinator


LIST_ATTRIBUTE = "_kvcached_list"
"""Attribute of an allocator of the engine that names the list of this library."""

r"""How the ranks become elastic together: from nothing decided to a scheduler that serves.

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
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch

from .. import _native
from ..coord.core.errors import ConfigError
from ..faults import FaultPlan
from ..snapshot import unique_name
from ..stream import EngineList, StreamCoordinator
from . import capacity, engine, specs
from .fence import StreamFence
from .lists import TokenList
from .native import EXIT_PRIORITY, NativePools
from .offer import Offer, common_draft, offer, refusals
from .reservations import Reservations
from .rows import RowList
from .runtime import LIST_ATTRIBUTE, Phase, Runtime
from .watch import Watch

if TYPE_CHECKING:
    from ..agent import Fence
    from ..pools.backing import StageBacking
    from .drafts import Draft

_log = logging.getLogger("kvcached_dist.sglang")


class Starting:
    """The collective start of one scheduler process.

    Args:
        runtime: what serves afterwards; this moves its phase.
        missing: places of the engine that should be hooked and are not.

    Attributes:
        configurator: the engine's ``KVCacheConfigurator``, once agreed.
        sizes: the engine's derived sizes, as agreed.
        draft: the draft model whose pool is backed with the target's, as agreed.

    Threads: the scheduler thread.
    """

    def __init__(self, runtime: Runtime, missing: Callable[[], list[str]]) -> None:
        self.runtime = runtime
        self.configurator: Any = None
        self.sizes: Any = None
        self.draft: Draft | None = None
        self._missing = missing
        self._scheduler: Any = None
        self._reservations: Reservations | None = None
        self._native: NativePools | None = None
        self._name = ""

    # ------------------------------------------------------------------ what is agreed

    @property
    def forward_stream(self) -> Any:
        """Stream of the engine's batches on CUDA, ``None`` elsewhere; once agreed."""
        return self.configurator.forward_stream if self.configurator.device == "cuda" else None

    @property
    def parallel(self) -> engine.Group:
        """The ranks that share this rank's queue of requests and block ids, once agreed."""
        return engine.group_of(engine.parallel_of(self.configurator))

    @property
    def model_layers(self) -> int:
        """Layers of the whole model, once agreed."""
        return int(self.configurator.model_config.num_hidden_layers)

    # ------------------------------------------------------------------ the way

    def worker_starts(self, scheduler: Any) -> None:
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
        if configurator.is_draft_worker or self.runtime.phase is not Phase.UNDECIDED:
            return None
        self.configurator = configurator
        mine = offer(configurator, sizes, self.runtime.config, self._missing(), self._scheduler)
        offers: list[Offer] = self._gather(dataclasses.replace(mine, name=unique_name()), "offer")
        self._name = self.runtime.config.ipc_name or offers[0].name
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
        self.runtime.phase = Phase.AGREED
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

    def start(self, describe: Callable[[int], specs.Takeover]) -> StageBacking | None:
        """Collective: reservations of this stage, their null pages backed on all ranks; ``None``: pools stay native.

        Args:
            describe: what is to be taken over, for a granule in bytes; ``ConfigError`` where it cannot be.

        Raises:
            ConfigError: with ``KVCACHED_REQUIRE``, the pools would stay native.
            GroupFailed, WaitTimeout: a rank failed or did not come.
        """
        config = self.runtime.config
        takeover: specs.Takeover | None = None
        try:
            host = self.configurator.device == "cpu"
            takeover = describe(config.host_granule_bytes if host else capacity.CUDA_GRANULE_BYTES)
            reason = ""
        except ConfigError as error:
            reason = str(error)
        refused = [f"rank {rank}: {why}" for rank, why in enumerate(self._gather(reason, "takeover")) if why]
        if refused or takeover is None:
            self.stay_native("; ".join(refused))
            return None
        coordinator, lists = self._coordinator(takeover)
        self.runtime.take_over(takeover, coordinator, lists)
        return coordinator.backing

    def _coordinator(self, takeover: specs.Takeover) -> tuple[StreamCoordinator, dict[str, TokenList | RowList]]:
        """Collective: the coordinator of this process, and the free lists of its domains."""
        config, group = self.runtime.config, self.parallel
        host = engine.store_host(self.configurator.server_args)
        store, session = engine.open_store(host, group, config.start_timeout_s)
        lists: dict[str, TokenList | RowList] = {}

        def make_lists(blocks: Sequence[int], per_page: Sequence[int]) -> list[EngineList]:
            for domain, count, pages in zip(takeover.stage.domains, blocks, per_page, strict=True):
                kind = RowList if domain.name == specs.ROWS else TokenList
                lists[domain.name] = kind(domain.name, count, pages, takeover.ids[domain.name])
            return list(lists.values())

        coordinator = StreamCoordinator.start(
            world=group.world,
            stage=takeover.stage,
            device=self._device(),
            config=dataclasses.replace(config, ipc_name=group.name(config.ipc_name)),
            make_lists=make_lists,
            store=store,
            session=session,
            faults=FaultPlan.parse(config.faults.split(";"), group.world.size) if config.faults else None,
            fence=self._fence(lists),
        )
        return coordinator, lists

    def _device(self) -> _native.Device:
        if self.configurator.device == "cuda":
            return _native.CudaDevice(self.configurator.gpu_id)
        config = self.runtime.config
        return _native.HostDevice(
            config.host_capacity_bytes, config.host_granule_bytes, card_file=config.host_card_file
        )  # fmt: skip

    def _fence(self, lists: dict[str, TokenList | RowList]) -> Callable[[], Fence] | None:
        if self.configurator.device != "cuda":
            return None
        return lambda: StreamFence(
            (self.forward_stream, torch.cuda.current_stream()),
            [check for known in lists.values() for check in known.take_checks()],
        )

    def bind(self, pools: Any) -> None:
        """The engine has built its allocators: their lists hold published ids only from now on."""
        runtime = self.runtime
        if runtime.phase is Phase.AGREED:
            self.stay_native(f"rank {engine.world_rank()}: the engine built a {type(pools.token_to_kv_pool).__name__}")
        if self._native is not None:
            self._native.add(pools)
        if runtime.phase is not Phase.STARTED:
            return
        allocator = pools.token_to_kv_pool_allocator
        owners = {
            specs.FULL: getattr(allocator, "full_attn_allocator", allocator),
            specs.SWA: getattr(allocator, "swa_attn_allocator", None),
            specs.ROWS: pools.req_to_token_pool,
        }
        for name, known in runtime.lists.items():
            setattr(owners[name], LIST_ATTRIBUTE, known)
            known.bind(owners[name])
        runtime.phase = Phase.BOUND
        self.reserve(pools)

    def reserve(self, pools: Any, prefix: str = "") -> None:
        """Account for what the engine has built for itself beside the elastic pools; tell of native ones.

        Args:
            pools: what the engine's ``_init_pools`` returned.
            prefix: in front of the names of its pools.
        """
        if self._native is not None:
            self._native.add(pools, prefix)
        if not self.runtime.elastic or not self.runtime.config.sglang_dsv4_runtime_reservation:
            return
        if self._reservations is None:
            coordinator = self.runtime.started
            native, indices = coordinator.backing.native, range(len(coordinator.stage.pools))
            self._reservations = Reservations(
                coordinator.register_runtime_pool, self.configurator.device,
                frozenset(native.base(index) for index in indices), rank=coordinator.world.rank,
            )  # fmt: skip
        self._reservations.add(pools, prefix)

    def attach(self, scheduler: Any) -> None:
        """Collective: the scheduler exists on all ranks and every hook is in force; marks may flow.

        Raises:
            ConfigError: buffers are elastic and something that must be hooked is not.
            WaitTimeout: a rank did not come.
        """
        phase = self.runtime.phase
        if phase is Phase.NATIVE:
            return
        missing = self._missing()
        if phase is Phase.STARTED:
            # Its buffers are elastic and its free lists hold ids without memory: too late for native pools.
            what = ", ".join(missing) or "KVCacheConfigurator._init_pools, or what the engine calls instead"
            raise ConfigError(
                f"rank {self.parallel.world.rank}: the engine has elastic buffers, but its free lists were never taken"
                f" over (phase {phase.value}); not hooked: {what}. Run kvcached-dist sglang in this environment,"
                " and start without ENABLE_KVCACHED until it says that every hook is in force"
            )
        if phase is not Phase.BOUND:
            self.stay_native(f"the engine built its pools elsewhere (phase {phase.value})")
            return
        said = enumerate(self._gather(missing, "attach"))
        late = [f"rank {rank}: {', '.join(names)}" for rank, names in said if names]
        if late:
            raise ConfigError(f"hooks went out of force while the engine started ({'; '.join(late)})")
        self.runtime.serve(scheduler)
        coordinator = self.runtime.started
        Watch(coordinator).start()
        # A scheduler leaves through multiprocessing, which runs its own finalizers and not those of atexit. The
        # others are told, so that an orderly end is not taken for a death.
        Finalize(None, coordinator.close, exitpriority=EXIT_PRIORITY)
        self._tell_elastic(coordinator)

    def stay_native(self, reason: str) -> None:
        """The engine's own pools stay; one line says why.

        Raises:
            ConfigError: with ``KVCACHED_REQUIRE``.
        """
        runtime = self.runtime
        runtime.phase, runtime.reason = Phase.NATIVE, reason
        if runtime.config.require:
            raise ConfigError(f"KVCACHED_REQUIRE=1, but the pools would stay native: {reason}")
        _log.warning("event=pool rank=%d name=all elastic=no why=%r", engine.world_rank(), reason)
        if self.configurator is not None:
            self._native = NativePools(runtime.config, self._name, reason, self.configurator)

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
        return engine.gather(value, item, self.runtime.config.start_timeout_s)

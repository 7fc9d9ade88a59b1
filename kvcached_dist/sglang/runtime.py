"""What is elastic in this scheduler process, and what the hooks ask and tell it while the engine serves."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..coord.core.entries import Evict, Growable, Publish, Retire, Unretire
from ..coord.core.errors import ConfigError, InvariantViolation
from . import engine, specs
from .cache_budget import CacheBudget
from .compaction import Compaction
from .needs import Needs
from .parked import ParkedChunk
from .request_table import RequestTable

if TYPE_CHECKING:
    from ..coord.core.types import Run
    from ..stream import StreamCoordinator
    from .lists import TokenList
    from .rows import RowList


class Phase(Enum):
    """How far this process has come; :mod:`.starting` draws the way."""

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
    """What one scheduler process serves with; filled by its start.

    Args:
        config: settings, read once.

    Attributes:
        config: the settings.
        phase: how far this process has come.
        reason: why nothing is elastic, in phase ``NATIVE``.
        coordinator: of this process, once it is started.
        lists: the engine's free lists, by domain.
        parked: how long a part of a prompt has waited with nothing else running.
        evicted_tokens: tokens of the prefix cache that were evicted at marks.
        compacted_tokens: tokens that the prefix cache keeps and that were moved at idle.

    Threads: the scheduler thread.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.phase = Phase.UNDECIDED
        self.reason = ""
        self.coordinator: StreamCoordinator | None = None
        self.lists: dict[str, TokenList | RowList] = {}
        self.parked = ParkedChunk(config.parked_s)
        self.evicted_tokens = self.compacted_tokens = 0
        self._cache_budget = CacheBudget(config)
        self._scheduler: Any = None
        self._compaction: Compaction | None = None
        self._needs: Needs | None = None
        self._takeover: specs.Takeover | None = None
        self._drafts: list[bool] = []
        self._request_table = RequestTable()
        self._takes: tuple[bool, ...] = ()
        """Of each domain, whether a step that only decodes takes from it."""

    @property
    def elastic(self) -> bool:
        """Whether the engine runs on elastic pools."""
        return self.phase in (Phase.BOUND, Phase.SERVING)

    @property
    def started(self) -> StreamCoordinator:
        """The coordinator, once it is started.

        Raises:
            ConfigError: it is not.
        """
        if self.coordinator is None:
            raise ConfigError(f"no coordinator in phase {self.phase.value}")
        return self.coordinator

    # ------------------------------------------------------------------ from the start

    def take_over(
        self, takeover: specs.Takeover, coordinator: StreamCoordinator, lists: dict[str, TokenList | RowList]
    ) -> None:
        """Buffers are elastic from now on.

        Args:
            takeover: what is taken over on this rank.
            coordinator: of this process, started.
            lists: of each domain, not yet bound to the engine's allocators.
        """
        self._takeover, self.coordinator, self.lists = takeover, coordinator, lists
        self._takes = tuple(domain.name != specs.ROWS for domain in takeover.stage.domains)
        self.phase = Phase.STARTED

    def draft_built(self, *, elastic: bool) -> None:
        """The engine has built the pools of a draft model.

        Args:
            elastic: they are the described ones, backed with the target's.
        """
        self._drafts.append(elastic)

    def serve(self, scheduler: Any) -> None:
        """Marks may flow from now on.

        Args:
            scheduler: the engine's, with its workers and pools.
        """
        self._scheduler = scheduler
        self.phase = Phase.SERVING

    # ------------------------------------------------------------------ the stream

    def decide(self, pulled: Sequence[Any]) -> Mark | None:
        """On rank 0, with the pulled requests in hand and the broadcast about to follow."""
        coordinator = self.started
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
        if self._compacting().due(idle=idle and not surplus):
            coordinator.compact()
        pages, rows = needs.pages_and_rows(pulled)
        wanted = {name: rows if name == specs.ROWS else pages for name in self.lists}
        if rows and (known := self.lists.get(specs.SWA)) is not None:
            free = int(self._scheduler.req_to_token_pool.available_size()) + self.unpublished_tokens(specs.ROWS)
            wanted[specs.SWA] = min(pages + needs.window_pages(rows, free), known.book.ids)
        decoding = needs.running_pages()
        running = {name: min(decoding, count) for name, count in wanted.items() if name != specs.ROWS}
        coming = {specs.FULL: needs.coming_pages}
        frames = coordinator.decide(wanted, idle=idle, running=running, coming=coming)
        return Mark(frames) if frames else None

    def to_broadcast(self, pulled: Sequence[Any]) -> list[Any]:
        """On rank 0: what this library puts into the broadcast that follows at once.

        Args:
            pulled: the requests in hand.
        """
        if self._goes_on(pulled):
            return []
        mark = self.decide(pulled)
        if self._needs is None:
            return []
        aborts = self.parked.aborts(self._scheduler.chunked_req, self._needs.nothing_runs)
        return aborts if mark is None else [*aborts, mark]

    def _goes_on(self, pulled: Sequence[Any]) -> bool:
        """Whether nothing but decoding goes on, and memory for it is there: nearly every step, found for little."""
        needs, coordinator = self._needs, self.coordinator
        if needs is None or coordinator is None or self.parked.waits:
            return False
        pages = needs.decoding(pulled)
        return pages > 0 and coordinator.goes_on([pages * takes for takes in self._takes])

    def queued(self, request: Any) -> None:
        """The engine has put a request into its queue; only rank 0 needs to know."""
        if self._needs is not None:
            self._needs.queued(request)

    def apply(self, mark: Mark) -> None:
        """On every rank, before anything else of the same list is handled."""
        entries = self.started.apply(mark.frames)
        if any(isinstance(entry, Publish | Unretire | Growable) for entry in entries):
            self._try_refused_again()
        for entry in entries:
            if isinstance(entry, Evict):
                self.evicted_tokens += engine.evict(self._scheduler.tree_cache, entry.tokens)
        if any(isinstance(entry, Evict) and not entry.tokens for entry in entries):
            self._compact()
        retired = [run for entry in entries if isinstance(entry, Retire) and not entry.retained for run in entry.runs]
        if retired:
            self._forget_ids(retired)

    def _compact(self) -> None:
        try:
            self.compacted_tokens += self._compacting().run()
        except RuntimeError as error:
            # Torch's, of the device: nothing has moved here, but other ranks may have.
            why = f"rank {self.started.world.rank}: cached prefixes could not be moved as on the other ranks ({error});"
            self.started.broken(
                InvariantViolation("S5", f"{why} restart the engine, with more memory left on the card")
            )

    def _compacting(self) -> Compaction:
        if self._compaction is None:  # not before the engine has its prefix cache
            started = self.started
            lanes = {name: started.backing.lanes(name) for name in self.lists}
            stages, drafts_too = started.stage.pp_size, bool(self._drafts) and all(self._drafts)
            self._compaction = Compaction(
                self.lists, self._scheduler, lanes, stages, drafts_too=drafts_too, wanted=self.config.compaction
            )
        return self._compaction

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
            self.started.broken(violation)

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
        stage = self.started.stage
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
        growable = self.started.domains[domain].growable
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


LIST_ATTRIBUTE = "_kvcached_list"
"""Attribute of an allocator of the engine that names the list of this library."""

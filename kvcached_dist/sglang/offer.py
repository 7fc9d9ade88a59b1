"""What each rank says before any pool exists; all of it is exchanged once, and all ranks conclude the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..coord.core.errors import ConfigError
from . import capacity, drafts, engine

if TYPE_CHECKING:
    from ..config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank says.

    Attributes:
        refused: why its pools stay native; empty: they can be elastic.
        tokens: what its device could ever hold.
        draft: draft model whose pool it can back with the target's; ``None``: there is none, or it cannot.
        tokens_with_draft: what its device could ever hold of both.
        native_draft: why the pool of its draft model stays with the engine; empty where there is none.
        name: a name of the engine for tools, should the operator have given none; that of rank 0 holds.
    """

    refused: str = ""
    tokens: int = 0
    draft: drafts.Draft | None = None
    tokens_with_draft: int = 0
    native_draft: str = ""
    name: str = ""

    def held(self, draft: drafts.Draft | None) -> int:
        """Tokens that its device could ever hold, with or without the draft model."""
        return self.tokens if draft is None else self.tokens_with_draft


def offer(configurator: Any, sizes: Any, config: Config, missing: Sequence[str], scheduler: Any) -> Offer:
    """What this rank says.

    Args:
        configurator: the engine's ``KVCacheConfigurator``, about to build pools.
        sizes: the sizes that it derived.
        config: settings.
        missing: places of the engine that should be hooked and are not.
        scheduler: the engine's scheduler, making its workers; ``None``: not known.
    """
    if missing:
        return Offer(refused=f"not hooked: {', '.join(missing)}")
    refused = engine.refusal(configurator, dsv4_bridge=config.sglang_dsv4_kv_pool_bridge)
    if refused:
        return Offer(refused=refused)
    try:
        tokens = capacity.fitting_tokens(configurator, sizes, config)
        if configurator.spec_algorithm.is_none():
            return Offer(tokens=tokens)
        try:
            draft = drafts.described(scheduler, configurator)
        except ConfigError as error:
            return Offer(tokens=tokens, native_draft=str(error))
        both = capacity.fitting_tokens(configurator, sizes, config, draft)
        return Offer(tokens=tokens, draft=draft, tokens_with_draft=both)
    except ConfigError as error:
        return Offer(refused=str(error))
    except AttributeError as error:
        return Offer(refused=f"this version of the engine is laid out differently ({error})")


def refusals(offers: Sequence[Offer]) -> str:
    """Why the pools of all ranks stay native; empty: they become elastic."""
    return "; ".join(f"rank {rank}: {made.refused}" for rank, made in enumerate(offers) if made.refused)


def common_draft(offers: Sequence[Offer]) -> tuple[drafts.Draft | None, str]:
    """The draft model whose pool all ranks back with the target's; else why it stays with the engine, or nothing."""
    reasons = [f"rank {rank}: {made.native_draft}" for rank, made in enumerate(offers) if made.native_draft]
    if reasons:
        return None, "; ".join(reasons)
    first = offers[0].draft
    other = [rank for rank, made in enumerate(offers) if made.draft != first]
    if other:
        return None, f"rank {other[0]} has {offers[other[0]].draft}, rank 0 has {first}"
    return first, ""

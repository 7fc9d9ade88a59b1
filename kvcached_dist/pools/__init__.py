"""Pools: what a model keeps, how large its domains are, where the bytes lie, and the memory behind them.

======================  ======================================================================
:mod:`.specs`           :class:`PoolSpec`, :class:`DomainSpec`, :class:`ModelSpec`, :class:`StageSpec`
:mod:`.sizing`          :class:`ModelPlan`: from a capacity to sizes, as the native engine does it
:mod:`.catalogue`       known models: ``catalogue.get(name, **options) -> ModelPlan``
:mod:`.validate`        checks with messages for operators
:mod:`.layout`          addresses inside a reservation; physical bytes of a set of runs
:mod:`.geometry`        the same as native plain data
:mod:`.backing`         :class:`StageBacking`: the memory of one rank
:mod:`.tensors`         zero-copy views
======================  ======================================================================

Only :mod:`.geometry`, :mod:`.backing` and :mod:`.tensors` need torch or the native module; they are
imported on first use, so that sizing works anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import catalogue
from .layout import check_capacity, minimum_bytes
from .sizing import DomainPlan, ModelPlan
from .specs import DomainSpec, FillPiece, ModelSpec, PoolSpec, RowRule, StageSpec, layer_range
from .validate import check_draft_tokens, check_page_size

if TYPE_CHECKING:
    from .backing import StageBacking


def __getattr__(name: str) -> Any:
    if name == "StageBacking":
        from .backing import StageBacking

        return StageBacking
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DomainPlan",
    "DomainSpec",
    "FillPiece",
    "ModelPlan",
    "ModelSpec",
    "PoolSpec",
    "RowRule",
    "StageBacking",
    "StageSpec",
    "catalogue",
    "check_capacity",
    "check_draft_tokens",
    "check_page_size",
    "layer_range",
    "minimum_bytes",
]

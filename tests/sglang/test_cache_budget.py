"""What of the prefix cache has to go, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcached_dist.config import Config
from kvcached_dist.pools.specs import DomainSpec, StageSpec
from kvcached_dist.sglang import specs
from kvcached_dist.sglang.cache_budget import CacheBudget
from kvcached_dist.stream import StreamCoordinator

PAGE = 16


def surplus(
    cached: int,
    *,
    budget: int = 1000,
    idle: bool = False,
    short: int = 0,
    over: int = 0,
    free: int = 5,
    calm: bool = False,
) -> int:
    domains = (DomainSpec(specs.FULL, 512, PAGE),)
    coordinator = SimpleNamespace(
        stage=SimpleNamespace(
            domain=StageSpec("test", "", 0, 1, 0, 1, domains, ()).domain, page_bytes=lambda _: 4096
        ),
        short_blocks=lambda _: short,
        overage_bytes=over,
        calm=calm,
    )  # fmt: skip
    tree = SimpleNamespace(evictable_size=lambda: cached)
    known: Any = SimpleNamespace(available=lambda: free)
    made = CacheBudget(Config.preset("tests", max_cached_tokens=budget))
    return made.surplus(cast(StreamCoordinator, coordinator), tree, known, idle=idle)


@pytest.mark.parametrize("cached", [0, 999, 1000])
def test_nothing_goes_within_the_budget(cached: int) -> None:
    assert surplus(cached, idle=True, short=10_000) == 0


def test_a_busy_engine_keeps_what_nobody_else_wants() -> None:
    assert surplus(500_000) == 0


def test_in_a_calm_memory_is_not_short_and_is_not_asked_for() -> None:
    assert surplus(5000, short=10, calm=True) == 0
    assert surplus(5000, idle=True, calm=True) == 4000


def test_at_idle_the_cache_goes_down_to_its_budget() -> None:
    assert surplus(5000, idle=True) == 4000
    assert surplus(5000, budget=0, idle=True) == 5000
    assert surplus(500_000, budget=-1, idle=True) == 0


def test_where_memory_is_short_as_much_goes_as_is_short_and_never_below_the_budget() -> None:
    assert surplus(5000, short=10) == 160
    assert surplus(5000, short=1000) == 4000
    assert surplus(5000, budget=-1, short=1000) == 0


def test_a_busy_engine_evicts_in_parts_that_are_worth_a_message() -> None:
    assert surplus(64 * 160 + 1, short=10) == 0
    assert surplus(64 * 160, short=10) == 160


def test_a_lowered_limit_evicts_only_where_nothing_is_free() -> None:
    assert surplus(500, over=8192, free=0) == 2 * PAGE
    assert surplus(20, over=8192, free=0) == 20
    assert surplus(500, over=8192) == 0

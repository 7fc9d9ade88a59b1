"""Says which rule a test breaks on purpose, so that a meta-test can tell whether every rule is broken by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvcached_dist.coord.core.invariants import RULES

Test = TypeVar("Test", bound=Callable[..., object])


def provokes(*rules: str) -> Callable[[Test], Test]:
    """Mark a test in which each of these rules does not hold, and somebody notices.

    Raises:
        KeyError: an id that no rule has.
    """
    for rule in rules:
        RULES[rule]
    return lambda test: test

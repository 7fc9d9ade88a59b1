"""Two engines on one card: what one gives back, the other one that was refused sees at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_dist import Coordinator
from tests.coordinator.world import GRANULE, simple_model, two_on_a_card

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

BEAT_S = 4.0
"""A regular look at memory and the beat behind it tell of more after up to twice this."""

PAGE = 8 * GRANULE
CARD_PAGES = 15
"""Nine for either engine would be eighteen."""


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Coordinator]]:
    stage = simple_model().stage(0, 1)
    with two_on_a_card(tmp_path / "card", CARD_PAGES * PAGE, stage, beat_s=BEAT_S, lease_s=60.0) as engines:
        yield engines


def test_memory_that_a_neighbour_gives_back_is_used_long_before_the_next_beat(engines: list[Coordinator]) -> None:
    neighbour, other = engines
    theirs = neighbour.domains["full"].alloc(8)
    mine = other.domains["full"].alloc(5)
    assert theirs is not None
    assert mine is not None
    assert other.domains["full"].alloc(3) is None, "the card is full: this test shows nothing"
    time.sleep(0.3)
    assert other.domains["full"].alloc(3) is None
    neighbour.domains["full"].free(theirs)
    while neighbour.physical.held_bytes() > 2 * PAGE:
        neighbour.step()
        time.sleep(0.001)
    begin = time.monotonic()
    while other.domains["full"].alloc(3) is None:
        assert time.monotonic() < begin + 2 * BEAT_S + 1
        other.step()
        time.sleep(0.002)
    assert time.monotonic() - begin < BEAT_S / 4

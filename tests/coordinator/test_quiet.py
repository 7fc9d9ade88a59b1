"""What an engine's step costs the threads beside it: nobody wakes up for an event that is none of his business."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.test_stream import Rank, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the scheduler's counters of Linux"),
]

STEPS = 3000


def _awakenings(thread: threading.Thread) -> int:
    text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])


@pytest.mark.parametrize("size", [1, 2])
def test_steps_do_not_wake_who_waits_for_a_failure(size: int) -> None:
    """Each awakening takes the interpreter from the scheduler: once it was the largest cost of a step on a card."""

    def body(rank: Rank) -> Any:
        watch = threading.Thread(target=rank.coordinator.await_failure, args=(30.0,), daemon=True)
        watch.start()
        time.sleep(0.05)
        before, begin = _awakenings(watch), time.monotonic()
        for _ in range(STEPS // size):
            rank.iteration(0)
        return _awakenings(watch) - before, time.monotonic() - begin

    for found, seconds in run(body, size=size):
        assert found <= 2 + seconds, "it looks once a second"

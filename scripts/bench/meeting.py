"""Where the rank processes of one cell meet."""

from __future__ import annotations

import time
from typing import Any

MEET_S = 300.0
QUIET_S = 0.002


class Meeting:
    """Waits for the other rank processes. Calling it waits with a pause, :meth:`at_once` without one.

    Args:
        barrier: of all rank processes.

    Raises (both ways): ``BrokenBarrierError``: a rank has failed, or has not come for five minutes.
    """

    def __init__(self, barrier: Any) -> None:
        self._barrier = barrier

    def __call__(self) -> None:
        """Meet before a repetition.

        The pause keeps the one who is woken first from beginning while the others still wake, and gives the floor the
        same idle time before a repetition that an engine's growth has.
        """
        self._barrier.wait(MEET_S)
        time.sleep(QUIET_S)
        self._barrier.wait(MEET_S)

    def at_once(self) -> None:
        """Meet inside a repetition, and go on as soon as everybody is there."""
        self._barrier.wait(MEET_S)

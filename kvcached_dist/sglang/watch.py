"""What happens when the coordinator fails while the engine serves: the first cause is said, then the engine ends.

A rank that waits in a collective of the engine for a dead one would wait for many minutes. The engine ends on an
exception of a scheduler by signalling its parent, which kills all ranks; the same is done here, from a thread,
because the scheduler thread may be stuck in that collective.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

from ..stream import StreamCoordinator

_log = logging.getLogger("kvcached_dist.sglang")

LOOK_S = 1.0
"""Longest wait of one look; a failure wakes the thread at once."""

SETTLE_S = 0.1
"""A rank that goes down with the whole engine is killed within this time and has nothing to report."""

GRACE_S = 0.8
"""How long the parent has to end this process before it ends itself: with :data:`SETTLE_S`, a second after the failure.
The engine takes several to end a rank that is stopped, and the ranks that are not would wait for it."""


class Watch:
    """Waits for the failure of one coordinator.

    Args:
        coordinator: of this process.
    """

    def __init__(self, coordinator: StreamCoordinator) -> None:
        self._coordinator = coordinator
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._run, name="kvcached-watch", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def _run(self) -> None:
        while (failure := self._coordinator.await_failure(LOOK_S)) is None:
            if os.getppid() != self._parent:
                return
        time.sleep(SETTLE_S)
        rank = self._coordinator.world.rank
        _log.critical("event=engine_ends rank=%d phase=%r first_cause=%s", rank, failure.phase, failure.cause)
        for handler in logging.getLogger().handlers:
            handler.flush()
        sys.stderr.flush()
        if os.getppid() == self._parent:
            os.kill(self._parent, signal.SIGQUIT)
        time.sleep(GRACE_S)
        os._exit(1)

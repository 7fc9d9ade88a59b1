"""Removes what a process would leave behind, on every way out that gives a chance: exit and SIGTERM.

``kill -9`` gives none; what it leaves is recognised and swept by the next start.

An engine often leaves on SIGTERM through a path that runs no destructor, so the hooks run in the signal
handler itself: they must be short, take no lock and not raise. The handler that was there before runs
afterwards; where there was none the signal does what it does by default, so the exit status stays the same.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_log = logging.getLogger(__name__)

_hooks: dict[int, tuple[int, Callable[[], None]]] = {}
"""Number to (pid that registered it, hook). A forked child inherits the table, but not the duty."""
_next_number = 0
_registering = threading.Lock()
_previous: dict[int, Callable[[int, FrameType | None], object] | int] = {}
_atexit_installed = False


def on_exit(hook: Callable[[], None]) -> Callable[[], None]:
    """Runs a hook when this process leaves by exit or SIGTERM.

    Args:
        hook: idempotent, short, without locks. Not run in forked children.

    Returns:
        A function that takes the hook back; it may be called twice.

    Threads: any. The signal is only watched once the main thread has registered a hook, because only the
    main thread may set handlers.
    """
    global _next_number, _atexit_installed
    with _registering:
        number = _next_number
        _next_number += 1
        _hooks[number] = (os.getpid(), hook)
        if not _atexit_installed:
            atexit.register(run_hooks)
            _atexit_installed = True
        _watch(signal.SIGTERM)

    def take_back() -> None:
        _hooks.pop(number, None)

    return take_back


def run_hooks() -> None:
    """Runs every hook of this process, last one first, and forgets them."""
    for number in sorted(_hooks, reverse=True):
        pid, hook = _hooks.get(number, (0, None))
        if hook is not None and pid == os.getpid():
            _hooks.pop(number, None)
            # One hook that fails must not keep the others from running, nor the process from leaving.
            try:
                hook()
            except Exception:
                _log.exception("a hook failed while the process was leaving")


def _watch(signum: signal.Signals) -> None:
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signum) is _handle:
        return
    previous = signal.getsignal(signum)
    if previous is None or previous is signal.SIG_IGN:
        # Set outside of Python, where it cannot be chained, or ignored on purpose: leave it alone.
        return
    _previous[signum] = previous
    with contextlib.suppress(ValueError):  # a sub-interpreter has no say in signals
        signal.signal(signum, _handle)


def _handle(signum: int, frame: FrameType | None) -> None:
    run_hooks()
    previous = _previous.get(signum, signal.SIG_DFL)
    if callable(previous):
        previous(signum, frame)
        return
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


__all__ = ["on_exit", "run_hooks"]

"""One chaos run from start to end, with whatever ends it early."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
from collections.abc import Callable
from types import FrameType

from ..errors import Interrupted
from .cluster import Cluster
from .options import ChaosOptions
from .plan import Fault, make_plan
from .report import Outcome, Report
from .supervisor import Supervisor

_log = logging.getLogger(__name__)


def plan_of(options: ChaosOptions) -> tuple[Fault, ...]:
    """The plan that belongs to these options; equal for equal options."""
    return make_plan(options.faults, options.seed, options.world_size, options.lease_s, options.growth_deadline_s)


def run_chaos(options: ChaosOptions, on_outcome: Callable[[Outcome], None] | None = None) -> Report:
    """Run a plan on Ray actors.

    Args:
        options: validated options.
        on_outcome: called after every fault.

    Returns:
        The report; its exit status is 0 only without a violation.

    Raises:
        ConfigError: Ray is missing, or no cluster answers at the address.
        RigError: Ray or the host failed; says nothing about the product.
        Interrupted: SIGINT or SIGTERM came. Nothing of the run is left by then.

    Threads: the main thread, because it sets signal handlers. Blocks: a few seconds per fault.
    """
    with _Signals() as signals, contextlib.redirect_stdout(_News()):
        try:
            with Cluster(options) as cluster:
                signals.watch()  # Ray has set handlers of its own
                return Supervisor(options, plan_of(options), cluster, on_outcome).run()
        except KeyboardInterrupt:
            raise Interrupted(signals.seen) from None
        except SystemExit:
            # Ray's own handler, which is in force while Ray starts.
            raise Interrupted(signal.SIGTERM) from None


class _News(io.TextIOBase):
    """What Ray prints for people on standard output: a paragraph for every killed process."""

    def write(self, text: str) -> int:
        if text.strip():
            _log.debug("ray: %s", text.strip())
        return len(text)


class _Signals:
    """Turns SIGINT and SIGTERM into ``KeyboardInterrupt``: the one exception that a wait inside Ray lets through."""

    _WATCHED = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.seen: int = signal.SIGINT
        self._before = {signum: signal.getsignal(signum) for signum in self._WATCHED}

    def __enter__(self) -> _Signals:
        self.watch()
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def watch(self) -> None:
        """Set the handlers, again."""
        for signum in self._WATCHED:
            signal.signal(signum, self._stop)

    def _stop(self, signum: int, _: FrameType | None) -> None:
        self.seen = signum
        raise KeyboardInterrupt


__all__ = ["plan_of", "run_chaos"]

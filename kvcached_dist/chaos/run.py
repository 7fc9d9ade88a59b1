"""One chaos run from start to end, with whatever ends it early."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from ..errors import KVDistError
from .cluster import Cluster
from .options import ChaosOptions
from .plan import Fault, make_plan
from .report import Outcome, Report
from .supervisor import Supervisor

_log = logging.getLogger(__name__)


class Interrupted(KVDistError):
    """The run was ended by a signal.

    Args:
        signum: which.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum


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
    with _signals(), contextlib.redirect_stdout(_News()), Cluster(options) as cluster:
        _raise_on_signals()  # Ray has set handlers of its own
        return Supervisor(options, plan_of(options), cluster, on_outcome).run()


class _News(io.TextIOBase):
    """What Ray prints for people on standard output: a paragraph for every killed process."""

    def write(self, text: str) -> int:
        if text.strip():
            _log.debug("ray: %s", text.strip())
        return len(text)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    _raise_on_signals()
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _raise_on_signals() -> None:
    def stop(signum: int, _: FrameType | None) -> None:
        raise Interrupted(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)


__all__ = ["Interrupted", "plan_of", "run_chaos"]

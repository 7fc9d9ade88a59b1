"""Calls on a torch store, each bounded from outside.

Three habits of TCPStore decide how it is used (the contract tests pin them):

- a call on a server that hangs has no bound, so every call runs in a thread of its own that the caller
  stops waiting for at its deadline;
- a store object has one lock, so each of these threads has its own connection (``clone``);
- a blocking wait on several keys cannot tell which one is missing and, given up, needs an answer of the
  server to end; so waits poll.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from torch.distributed import DistError

from ..core.errors import KVDistError, WaitTimeout

POLL_S_MIN: Final = 0.002
POLL_S_MAX: Final = 0.05
"""A wait asks the server again after this long, the pause doubling."""

GRACE_S: Final = 0.5
"""How much longer than its own deadline the thread of a call may run before it is given up."""

T = TypeVar("T")


class Store(Protocol):
    """The part of a torch store that is used here; values come back as bytes."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...
    def clone(self) -> Store: ...


class StoreLost(KVDistError):
    """The server of the store is gone. Start-up or a change of epoch cannot go on; running links can."""


def run_bounded(call: Callable[[], T], timeout_s: float, *, who: str, what: Callable[[], str] | str) -> T:
    """Run a call that may block without bound and stop waiting for it at a deadline.

    A call that is given up goes on in its daemon thread until it returns; nobody sees its result.

    Args:
        call: what to run; it must own everything it touches.
        timeout_s: deadline in seconds.
        who: peer that is waited for.
        what: what is expected of it; a function is asked at the deadline.

    Raises:
        WaitTimeout: the deadline passed.
        Exception: whatever ``call`` raised.

    Blocks: at most ``timeout_s``.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # handed to the caller, whatever it is
            failure.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="kvcached-bounded-call", daemon=True).start()
    if not done.wait(timeout_s):
        raise WaitTimeout(who, what if isinstance(what, str) else what(), timeout_s)
    if failure:
        raise failure[0]
    return outcome[0]


def bounded_store_call(
    store: Store, call: Callable[[Store], T], timeout_s: float, *, what: Callable[[], str] | str
) -> T:
    """Run store calls on a connection of their own, bounded from outside.

    Raises:
        WaitTimeout: the deadline passed.
        StoreLost: the connection to the server broke.
    """

    def run() -> T:
        return call(store.clone())

    try:
        return run_bounded(run, timeout_s, who=server_name(store), what=what)
    except DistError as error:
        text = what if isinstance(what, str) else what()
        raise StoreLost(f"{server_name(store)} failed during {text}: {error}") from error


def server_name(store: Store) -> str:
    inner = getattr(store, "underlying_store", store)
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    return f"store server {host}:{port}" if host else "store server"


def poll(deadline: float) -> Callable[[], bool]:
    """A pause that grows up to ``POLL_S_MAX``; false once the deadline has passed."""
    pause = POLL_S_MIN

    def again() -> bool:
        nonlocal pause
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, POLL_S_MAX)
        return True

    return again


__all__ = ["GRACE_S", "Store", "StoreLost", "bounded_store_call", "poll", "run_bounded", "server_name"]

"""Calls on a torch store, each bounded from outside.

Habits of TCPStore decide how it is used (the contract tests pin the first two):

- A call on a server that hangs has no bound, so every call runs in a thread that the caller stops waiting
  for at its deadline.
- A store object has one lock, so each of these threads has its own connection (``clone``).
- A blocking wait on several keys cannot tell which one is missing and, given up, needs an answer of the
  server to end; so waits poll.
- Both ends look up host names for every connection, the server in its only thread: a lookup that gets no
  answer stalls the client, or all clients, for the resolver's time limit (5 s by default). So connections
  are kept and used again, and deadlines of start-up should be longer than that.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from torch.distributed import DistError

from ..core.errors import KVDistError, WaitTimeout

POLL_S_MIN: Final = 0.002
POLL_S_MAX: Final = 0.05
"""A wait asks the server again after this long, the pause doubling."""

GRACE_S: Final = 0.5
"""How much longer than its own deadline a call may run before it is given up."""

STUCK_MAX: Final = 8
"""Calls of one store that may be stuck in the server at the same time; further ones fail at once."""

_EXIT_JOIN_S: Final = 2.0

T = TypeVar("T")

_log = logging.getLogger(__name__)

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


class Store(Protocol):
    """The part of a torch store that is used here; values come back as bytes."""

    def set(self, key: str, value: str) -> None:
        """Write; has no reply, so it may succeed although nobody is there."""
        ...

    def get(self, key: str) -> bytes:
        """Read; blocks on a missing key."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        ...

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write if the value is the expected one."""
        ...

    def clone(self) -> Store:
        """Another connection to the same server."""
        ...


class StoreLost(KVDistError):
    """The server of the store is gone. Start-up or a change of epoch cannot go on; running links can."""


def join_at_exit(thread: threading.Thread) -> None:
    """Have the interpreter wait a little for a daemon thread that may be inside torch when it exits."""
    _threads.add(thread)


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
    job = _Job(lambda _: call())
    thread = threading.Thread(target=job.run, args=(None,), name="kvcached-bounded-call", daemon=True)
    join_at_exit(thread)
    thread.start()
    if not job.done.wait(timeout_s):
        raise WaitTimeout(who, _text(what), timeout_s)
    result: T = job.outcome()
    return result


def _text(what: Callable[[], str] | str) -> str:
    return what if isinstance(what, str) else what()


class _Job:
    """One call with its outcome."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call
        self._result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self, argument: Any) -> None:
        try:
            self._result = self._call(argument)
        except BaseException as error:  # handed to the caller, whatever it is
            self.error = error
        finally:
            self.done.set()

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self._result


class _Worker:
    """A thread with a connection of its own, made by its first call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="kvcached-store", daemon=True)
        join_at_exit(self.thread)
        _workers.add(self)
        self.thread.start()

    def submit(self, job: _Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """Let the thread end after the calls it has."""
        self._jobs.put(None)

    def _run(self) -> None:
        own: Store | None = None
        while (job := self._jobs.get()) is not None:
            if own is None:
                connecting = _Job(lambda _: self._store.clone())
                connecting.run(None)
                if connecting.error is not None:
                    job.error = connecting.error
                    job.done.set()
                    continue
                own = connecting.outcome()
            job.run(own)
            if isinstance(job.error, DistError):
                own = None  # the connection may be broken


class StoreConnections:
    """Connections to one store: one per call in progress, kept for later calls.

    Args:
        store: any torch store that can be cloned; it is not used itself.

    Threads: any.
    """

    def __init__(self, store: Any) -> None:  # torch's stubs do not declare clone
        self._store: Store = store
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._stuck: list[threading.Thread] = []
        inner = getattr(store, "underlying_store", store)
        host, port = getattr(inner, "host", None), getattr(inner, "port", None)
        self.name: str = f"store server {host}:{port}" if host else "store server"

    def call(
        self, call: Callable[[Any], T], timeout_s: float, *, what: Callable[[], str] | str, who: str | None = None
    ) -> T:
        """Run store calls on a connection of their own, bounded from outside.

        Args:
            call: gets the connection; what it does goes on unseen after the deadline.
            timeout_s: deadline in seconds.
            what: what is waited for; a function is asked at the deadline.
            who: who is waited for, the server by default.

        Raises:
            WaitTimeout: the deadline passed.
            StoreLost: the connection broke, or ``STUCK_MAX`` calls are stuck in the server already.
            Exception: whatever ``call`` raised.

        Blocks: at most ``timeout_s``.
        """
        worker = self._take(what)
        job = _Job(call)
        worker.submit(job)
        if not job.done.wait(timeout_s):
            worker.stop()
            with self._lock:
                self._stuck.append(worker.thread)
            raise WaitTimeout(who or self.name, _text(what), timeout_s)
        with self._lock:
            self._idle.append(worker)
        try:
            result: T = job.outcome()
        except DistError as error:
            raise StoreLost(f"{self.name} failed during {_text(what)}: {error}") from error
        return result

    def _take(self, what: Callable[[], str] | str) -> _Worker:
        with self._lock:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            if len(self._stuck) >= STUCK_MAX:
                raise StoreLost(f"{self.name} hangs: {len(self._stuck)} calls are stuck, not tried: {_text(what)}")
            return self._idle.pop() if self._idle else _Worker(self._store)

    def close(self) -> None:
        """Let idle connections go. Calls in progress end by themselves. Idempotent."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop()


@dataclass(slots=True)
class Poll:
    """Pauses of a wait that polls; they grow up to ``POLL_S_MAX``.

    Attributes:
        deadline: end of the wait, monotonic seconds.
    """

    deadline: float
    pause_s: float = POLL_S_MIN

    def again(self) -> bool:
        """Sleep a little; false once the deadline has passed."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self.pause_s, left))
        self.pause_s = min(2 * self.pause_s, POLL_S_MAX)
        return True


def _end_all() -> None:
    """At interpreter exit: as few threads as possible inside torch when the interpreter goes away."""
    deadline = time.monotonic() + _EXIT_JOIN_S
    for worker in list(_workers):
        worker.stop()
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in list(_threads)):
        _let_late_threads_sleep()


def _let_late_threads_sleep() -> None:
    """Keep a call that is still stuck from aborting the process when it returns during finalisation.

    Until Python 3.13 a thread that wants the interpreter lock back by then is ended by unwinding, through
    C++ frames that must not be unwound: the C++ runtime calls its terminate handler, which aborts a process
    that was about to exit in order. This handler makes the thread sleep instead; the exit goes on.

    Source: ``PyThread_exit_thread`` in CPython's ``take_gil``; ``std::set_terminate`` of libstdc++.
    """
    try:
        runtime, libc = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
        runtime._ZSt13set_terminatePFvvE(ctypes.cast(libc.pause, ctypes.c_void_p))
    except (OSError, AttributeError) as error:  # another C++ runtime: the abort stays possible
        _log.debug("event=terminate_handler_not_set error=%s", error)


atexit.register(_end_all)

__all__ = ["GRACE_S", "STUCK_MAX", "Poll", "Store", "StoreConnections", "StoreLost", "join_at_exit", "run_bounded"]

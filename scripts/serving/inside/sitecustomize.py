"""Times of the engine's steps, taken inside its scheduler: Python imports this by itself from a folder on its path.

With ``STEP_TIMES`` (a folder) set, a thread waits for the scheduler of this process and puts clocks around its parts
and this library's. Every few seconds it appends the steps since then to a file of this process, one JSON list a line:
whether the step before and this one are prefills, whether driver work went on beside it, milliseconds from one launch
to the next, of that in the parts, in the order of :data:`serving.steps.PARTS`, what the thread had of a processor, and
how often it waited. With ``SYNC_PLACES`` another thread does what is in :mod:`sync_places`.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_S = 300.0
WRITE_S = 2.0
LONGEST_S = 0.3
"""A longer way to the next launch is a pause, not a step."""

PREFILL = 1
"""``ForwardMode.EXTEND``."""

PLACES = (
    ("sglang.srt.managers.scheduler", "Scheduler", "ingest_requests", "receive"),
    ("sglang.srt.managers.scheduler", "Scheduler", "get_next_batch_to_run", "plan"),
    ("sglang.srt.managers.scheduler", "Scheduler", "run_batch", "launch"),
    ("sglang.srt.managers.scheduler", "Scheduler", "process_batch_result", "result"),
    ("kvcached_dist.sglang.runtime", "Runtime", "to_broadcast", "decide"),
    ("kvcached_dist.driver_work", "DriverWork", "perform", "driver"),
)
COUNTED = ("receive", "plan", "launch", "result", "decide")


class Clocks:
    """Collects steps.

    Threads: the scheduler's; only :attr:`driving` and :attr:`drove` are set by the worker.
    """

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []
        self.driving = self.drove = False
        self._spent = dict.fromkeys(COUNTED, 0.0)
        self._began = self._had = 0.0
        self._waited = 0
        self._prefill = False

    def put(self, owner: type, name: str, part: str) -> None:
        """A clock around one function."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **others: Any) -> Any:
            begin = time.perf_counter()
            if part == "driver":
                self.driving = self.drove = True
            elif part == "launch":
                self._launches(begin, int(args[1].forward_mode) == PREFILL)
            try:
                return function(*args, **others)
            finally:
                if part == "driver":
                    self.driving = False
                else:
                    self._spent[part] += time.perf_counter() - begin

        setattr(owner, name, timed)

    def _launches(self, now: float, prefill: bool) -> None:
        had, waited = time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        if now - self._began < LONGEST_S:
            spent = (now - self._began, *(self._spent[part] for part in COUNTED), had - self._had)
            times = (round(1000 * seconds, 4) for seconds in spent)
            self.steps.append([self._prefill, prefill, self.drove, *times, waited - self._waited])
        self._spent = dict.fromkeys(COUNTED, 0.0)
        self._had, self._waited = had, waited
        self._began, self._prefill, self.drove = now, prefill, self.driving


def schedules() -> bool:
    """Wait for the engine's scheduler; whether this process has one."""
    deadline = time.monotonic() + WAIT_S
    while not hasattr(sys.modules.get(PLACES[0][0]), "run_scheduler_process"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def watch_syncs(folder: str) -> None:
    """Wait for the scheduler, and count where it waits for the device."""
    if schedules():
        import sync_places

        module = importlib.import_module(PLACES[0][0])
        sync_places.watch(folder, os.environ.get("INSIDE_NAME", "server"), module.Scheduler)


def watch(folder: str) -> None:
    """Wait for the scheduler, put the clocks, write what they show."""
    if not schedules():
        return
    clocks = Clocks()
    for module, owner, name, part in PLACES:
        if module in sys.modules or os.environ.get("ENABLE_KVCACHED") == "1":
            clocks.put(getattr(importlib.import_module(module), owner), name, part)
    path = Path(folder, f"{os.environ.get('INSIDE_NAME', 'server')}-{os.getpid()}.jsonl")
    while True:
        time.sleep(WRITE_S)
        steps, clocks.steps = clocks.steps, []
        if steps:
            with path.open("a") as out:
                out.writelines(json.dumps(step) + "\n" for step in steps)


if os.environ.get("STEP_TIMES"):
    threading.Thread(target=watch, args=(os.environ["STEP_TIMES"],), name="step-times", daemon=True).start()
if os.environ.get("SYNC_PLACES"):
    threading.Thread(target=watch_syncs, args=(os.environ["SYNC_PLACES"],), name="sync-places", daemon=True).start()

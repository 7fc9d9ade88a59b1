"""Where the engine's steps wait for the device: torch says so itself, by a warning with the place in it.

With ``SYNC_PLACES`` (a folder) set, a thread waits for the scheduler of this process and switches torch's warnings
about synchronising operations on. Every few seconds it writes to a file of this process how many steps were launched
so far and how many warnings came from each place, all of the thread that runs the steps. A place is the file and
function of the innermost Python frame, and the next one outwards in this library, if there is one: what torch or the
engine does for a hook of ours counts as ours.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

WRITE_S = 1.0

SAID = "called a synchronizing CUDA operation"
"""Torch's words: ``warn_or_error_on_sync`` in ``c10/cuda/CUDAFunctions.cpp``."""

LIBRARY = f"{os.sep}kvcached_dist{os.sep}"


class Places:
    """Counts what torch warns of.

    Attributes:
        steps: launched so far.
        counts: warnings by place.

    Threads: counts only what the thread says that runs the steps, which is a scheduler process's main thread.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self._show = warnings.showwarning

    def listen(self) -> None:
        """Every warning of synchronising operations comes here from now on, all others go where they went."""
        warnings.filterwarnings("always", message=f".*{SAID}.*")
        warnings.showwarning = self._heard

    def count_steps(self, scheduler: type) -> None:
        """A step is a launch of the engine's."""
        launch: Any = scheduler.run_batch  # type: ignore[attr-defined]

        def counted(*args: Any, **others: Any) -> Any:
            self.steps += 1
            return launch(*args, **others)

        scheduler.run_batch = counted  # type: ignore[attr-defined]

    def _heard(self, message: Any, *rest: Any) -> None:
        if SAID not in str(message):
            self._show(message, *rest)
        elif threading.current_thread() is threading.main_thread():
            self.counts[place_of(sys._getframe(1))] += 1


def place_of(frame: FrameType | None) -> str:
    """The place of a frame, as in the module's text."""
    innermost, ours = "", ""
    while frame is not None and not ours:
        path = frame.f_code.co_filename
        # An engine may have put a function of its own in front of the one that shows warnings.
        if not path.endswith(f"{os.sep}warnings.py") and "showwarning" not in frame.f_code.co_name:
            mine = LIBRARY in path
            name = path[path.rindex(LIBRARY) + 1 :] if mine else os.sep.join(path.split(os.sep)[-2:])
            place = f"{name}:{frame.f_code.co_name}"
            innermost = innermost or place
            if mine:
                ours = place
        frame = frame.f_back
    return innermost if ours in ("", innermost) else f"{innermost} for {ours}"


def watch(folder: str, name: str, scheduler: type) -> None:
    """Listen, and write what was heard as long as the process lives."""
    import torch

    places = Places()
    places.count_steps(scheduler)
    places.listen()
    torch.cuda.set_sync_debug_mode("warn")
    path = Path(folder, f"{name}-{os.getpid()}.json")
    while True:
        time.sleep(WRITE_S)
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"steps": places.steps, "places": dict(places.counts)}))
        new.rename(path)

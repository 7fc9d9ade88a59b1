"""A subprocess that can neither end nor hold up the benchmark: killed with all its children when its time is over."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT = "RESULT "
"""Begins the line of standard output that holds a child's figures, as JSON; libraries may print other lines."""

TAIL = 600
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*", re.MULTILINE)
SCRIPTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    """How a subprocess ended.

    Attributes:
        text: its standard output.
        failure: why it failed, with the end of its standard error; empty when it ended with status 0.
        seconds: how long it ran.
        timed_out: it was killed because its time was over.
    """

    text: str
    failure: str
    seconds: float
    timed_out: bool = False


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Ended:
    """Run ``command`` for at most ``seconds``; whatever it started and left behind is killed.

    Blocks: until the command has ended or its time is over.
    """
    began = time.monotonic()
    # Files, not pipes: a grandchild that survives would keep a pipe open, and reading it would never end.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=dict(environment),
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Ended("", f"cannot be started: {error}", 0.0)
        try:
            status = process.wait(seconds)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out, status = True, 0
        finally:
            _kill_group(process)
        text, complaints = _read(output), _read(errors)
    if timed_out:
        failure = f"not done within {seconds:.0f} s{_said(complaints or text)}"
    elif status:
        failure = f"ended with {_named(status)}{_said(complaints or text)}"
    else:
        failure = ""
    return Ended(text, failure, round(time.monotonic() - began, 2), timed_out)


def figures(module: str, arguments: Sequence[str], seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """What ``python -m bench.MODULE`` reports in its result line, or ``{"skipped": reason}``."""
    ended = run([sys.executable, "-m", f"bench.{module}", *arguments], seconds, environment)
    lines = [line for line in ended.text.splitlines() if line.startswith(RESULT)]
    if not lines:
        return {"skipped": ended.failure or f"it reported nothing{_said(ended.text)}"}
    try:
        found: dict[str, Any] = json.loads(lines[-1][len(RESULT) :])
    except json.JSONDecodeError as error:
        return {"skipped": f"its result cannot be read: {error}"}
    if ended.failure:
        found["after"] = ended.failure  # the figures were complete; the end was not
    return found


def report(found: Mapping[str, Any]) -> None:
    """In the child: print the result line."""
    print(f"\n{RESULT}{json.dumps(found)}", flush=True)


def environment(**changes: str) -> dict[str, str]:
    """This process's environment for a child that finds these modules, without settings meant for an engine.

    Args:
        changes: variables to set.
    """
    kept = {name: value for name, value in os.environ.items() if "KVCACHED" not in name}
    path = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), **changes}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # The session of the command has its number; it may have left children that still hold memory of the card.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck inside the driver: not even a kill ends it, go on
        process.wait(10)


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode("utf-8", "replace"))


def _named(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def _said(text: str) -> str:
    """The errors that a process and its children printed, each once, else the end of what they printed."""
    raised = list(dict.fromkeys(_RAISED.findall(text)))
    end = "; ".join(raised)[:TAIL] if raised else " ".join(text.split())[-TAIL:]
    return f": {end}" if end else ""

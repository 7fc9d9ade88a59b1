"""What is measured of a server under load: the client's view, and memory from outside."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import multiprocessing
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvcached_dist import __version__

from . import load
from .load import Request
from .server import Server, mapped_bytes

SAMPLE_S = 0.02
WATCH_S = 0.1
SETTLE_S = 6.0
"""How long memory may take to come back before that is what is reported."""


def describe(benchmark: str, script: str) -> dict[str, Any]:
    """Everything that a reader needs to judge the figures."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    cards = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    return {
        "benchmark": benchmark,
        "command": shlex.join([script, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": __version__,
        "cards": cards,
        "torch": torch.__version__,
        "sglang": _sglang_version(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def _sglang_version() -> str:
    from importlib import metadata

    return metadata.version("sglang")


@contextlib.contextmanager
def turn(paths: Sequence[str], servers: Iterable[Server]) -> Iterator[None]:
    """Hold these lock files, one after the other: runs that start side by side measure in turn.

    Whoever waits stops its servers, so that whoever measures has the processors for itself.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as waiting:
            for server in servers if paths else ():
                waiting.enter_context(server.paused())
            for path in sorted(paths):
                lock = stack.enter_context(open(path, "w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def setting(text: str) -> tuple[str, str]:
    """An environment variable of a server, from the command line."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def card_used_bytes() -> list[int]:
    """Memory in use per card, of all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    return [int(line) << 20 for line in lines]


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Where the median of such values lies with this probability: percentiles of a seeded bootstrap."""
    choose = random.Random(1)
    medians = sorted(statistics.median(choose.choices(values, k=len(values))) for _ in range(2000))
    outside = (1 - share) / 2
    return load.quantile(medians, outside), load.quantile(medians, 1 - outside)


Series = list[tuple[float, list[int]]]


@contextlib.contextmanager
def watched(server: Server) -> Iterator[Series]:
    """Mapped bytes per rank over time while the body runs; native servers give nothing.

    Read by a process of its own: the client measures times, and a thread beside it would hold its interpreter up.
    """
    series: Series = []
    if not server.elastic:
        yield series
        return
    context = multiprocessing.get_context("spawn")
    ended, found = context.Event(), context.SimpleQueue()
    sampler = context.Process(target=_sample, args=(str(server.folder), server.name, ended, found), name="memory")
    sampler.start()
    series.append((0.0, found.get()))
    try:
        yield series
    finally:
        ended.set()
        series += found.get()
        sampler.join()


def _sample(folder: str, name: str, ended: Any, found: Any) -> None:
    series: Series = []
    found.put(mapped_bytes(folder, name))
    begin = time.perf_counter()
    while not ended.wait(WATCH_S):
        series.append((time.perf_counter() - begin, mapped_bytes(folder, name)))
    found.put(series)


def loaded(server: Server, requests: Sequence[Request], parallel: int) -> dict[str, Any]:
    """One load on one server: the client's view, and of elastic pools memory before, under load and after."""
    before, counters, steps = server.mapped_bytes(), server.counters(), server.steps()
    with watched(server) as series:
        answers = load.play(server.port, requests, parallel)
    result: dict[str, Any] = {"client": load.summary(answers)}
    result["errors"] = [answer.error for answer in answers if answer.error][:5]
    result["steps"] = server.steps() - steps
    if not server.elastic:
        server.flush()
        return result
    peak = [max(sample[1][rank] for sample in series) for rank in range(len(before))]
    returned = memory_returns(server, before, peak)
    after = server.counters()
    result["memory"] = {"idle": before, "peak": peak, **returned}
    result["counters"] = {name: after[name] - counters.get(name, 0) for name in after}
    return result


def memory_returns(server: Server, idle: Sequence[int], peak: Sequence[int]) -> dict[str, Any]:
    """Flush, and see how fast 95 % of what the load had mapped goes back."""
    server.flush()
    begin = time.perf_counter()
    wanted = [low + 0.05 * (high - low) for low, high in zip(idle, peak, strict=True)]
    reached: float | None = None
    series: Series = []
    while (now := time.perf_counter() - begin) < SETTLE_S:
        mapped = server.mapped_bytes()
        series.append((round(now, 3), mapped))
        if all(have <= want for have, want in zip(mapped, wanted, strict=True)):
            reached = now
            break
        time.sleep(SAMPLE_S)
    return {"after": series[-1][1], "returned_95_s": reached, "series": series[:: max(1, len(series) // 40)]}

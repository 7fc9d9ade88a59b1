#!/usr/bin/env python3
"""What one growth and one reclaim cost, beside the same driver calls without any protocol, in one run.

    scripts/bench_growth.py --backend cuda --ranks 1,2,4 --layers 43,61 --json docs/benchmarks/growth-h200.json

Compared are, for the pools of DeepSeek-V4-Flash (43 layers) and -Pro (61 layers), ranks as processes on one card (or on
several, ``--cards``) or on host memory:

- *bare driver*: create, map and set-access (unmap and release) for the same extents from one C++ loop, CUDA only;
- *floor*: ``reserve`` and ``map`` (``unmap`` and ``release``) of the native backing for the same runs, without any
  protocol, in the same number of processes at once; it includes the fill of fresh pages. The slowest rank counts;
- *ours*: ``alloc`` of a run's blocks with none free, from the call to the ids on rank 0; for a reclaim, from RETIRE to
  the last RELEASED.

Each series has two warm-ups. *Sustained* is a row of growths without a free; its rate counts the bytes of the pages
that were asked for, not the granules. *Allowed* is 1.25 x floor + 0.5 ms; the share allowed for sustained growth is
0.8 of the floor.

``--profile`` says where the time of each growth goes, and measures the floor in lock step beside it. Measured too are
alloc and free without growth, and how much comes back at 50 % random occupancy (``--only-occupancy``: nothing else).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench import bare, blocks, occupancy, peer, peer_tp, rank, tables, world
from bench.plan import MODELS, Options, all_runs, pages_of
from rich.console import Console

from kvcached_dist import __version__, _native

HOST_SHARE = 0.5
CARD_SHARE = 0.85


def main() -> int:
    """Measure, print, write."""
    arguments = parse()
    console = Console(width=max(180, Console().width), highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        library = bare.build(folder) if arguments.backend == "cuda" and not arguments.no_bare else ""
        options = options_from(arguments, library)
        report = describe(arguments, options)
        machine = f"driver {report['driver']}, {report['cpus']} CPUs, load {report['load']}"
        console.print(f"[bold]{report['card']}[/], {machine}")
        if not arguments.only_occupancy:
            for ranks in arguments.ranks:
                report["cells"] += measure(console, options, ranks)
                write(arguments.json, report)
    if not arguments.no_blocks:
        report["blocks"] = blocks.measure()
        report["blocks_beside"] = blocks.beside(arguments.backend)
        tables.blocks(console, report["blocks"], report["blocks_beside"])
    if not arguments.no_occupancy:
        device = rank.make_device(options, 1)
        report["occupancy"] = occupancy.measure(device, options.layers[0], arguments.occupancy_runs)
        tables.occupancy(console, report["occupancy"])
        write(arguments.json, report)
    if arguments.backend == "cuda" and not arguments.no_peer:
        beside_peer(console, arguments, options, report)
    report["load_after"] = [round(value, 2) for value in os.getloadavg()]
    if write(arguments.json, report):
        console.print(f"raw figures: {arguments.json}")
    return 0


def beside_peer(console: Console, arguments: argparse.Namespace, options: Options, report: dict[str, Any]) -> None:
    """kvcached on these cards, in processes of its own: figures or reasons, never an error of this run."""
    alone = attempt(peer.measure, options.layers, options.repeats)
    report["kvcached"] = peer.beside_ours(alone, report["cells"])
    tables.peer(console, "kvcached, one process on one card", alone)
    write(arguments.json, report)
    ranked = attempt(peer_tp.measure, options.layers, arguments.ranks, options.cards, arguments.peer_tp)
    report["kvcached_tp"] = peer.beside_ours(ranked, report["cells"])
    tables.peer(console, "kvcached's own benchmark, one card per rank", ranked)


def attempt(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What a measurement of another project found, or the error that it raised as the reason for having nothing."""
    try:
        return measure(*arguments)
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {error}"}


def write(path: str, report: dict[str, Any]) -> bool:
    """Write what is measured so far; whether a file was asked for."""
    if path:
        Path(path).write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")
    return bool(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of growth and reclaim against the driver floor, in one run.")
    parser.add_argument("--backend", choices=("host", "cuda"), default="host")
    parser.add_argument("--ranks", type=all_runs, default=all_runs("1,2,4"))
    parser.add_argument("--cards", type=int, default=1, help="rank r is on card r %% CARDS")
    parser.add_argument("--layers", type=all_runs, default=all_runs("43,61"))
    parser.add_argument("--runs", type=all_runs, default=all_runs("1,4,16,64,256,1024,2048"), help="pages of a run")
    parser.add_argument("--repeats", type=int, default=20, help="repetitions of a short run; long ones get fewer")
    parser.add_argument("--memory", type=float, default=0, help="GiB that all ranks may use together")
    parser.add_argument("--json", default="", help="write command, machine and raw figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and a shorter sustained series")
    parser.add_argument("--floor-only", action="store_true", help="no coordinator: the floor alone")
    parser.add_argument("--no-bare", action="store_true", help="leave the bare driver loop out (it needs a compiler)")
    parser.add_argument("--no-blocks", action="store_true", help="leave alloc and free without growth out")
    parser.add_argument("--no-occupancy", action="store_true", help="leave reclaim at 50 %% random occupancy out")
    parser.add_argument("--occupancy-runs", type=all_runs, default=occupancy.RUNS, help="pages of a run, for that")
    parser.add_argument("--only-occupancy", action="store_true", help="reclaim at 50 %% random occupancy alone")
    parser.add_argument("--no-peer", action="store_true", help="leave kvcached's growth out (it is measured with cuda)")
    parser.add_argument(
        "--peer-tp", default="", metavar="PATH", help="kvcached_tp_ipc_benchmark.py, if not beside kvcached"
    )
    parser.add_argument("--profile", action="store_true", help="say where the time of each growth goes")
    arguments = parser.parse_args()
    if arguments.only_occupancy:
        if arguments.no_occupancy:
            parser.error("--only-occupancy and --no-occupancy leave nothing to measure: give one of them")
        arguments.no_bare = arguments.no_blocks = arguments.no_peer = True
    unknown = sorted(set(arguments.layers) - set(MODELS))
    if unknown:
        parser.error(f"--layers {unknown[0]}: models with {sorted(MODELS)} layers are known")
    usable, reason = _native.cuda_available() if arguments.backend == "cuda" else (True, "")
    if not usable:
        parser.error(f"--backend cuda: {reason}; use --backend host")
    return arguments


def options_from(arguments: argparse.Namespace, library: str) -> Options:
    memory_bytes = int(arguments.memory * 2**30) or _memory_bytes(arguments.backend)
    beside: dict[int, tuple[int, ...]] = {}
    if arguments.backend == "cuda" and not arguments.no_peer and not peer.missing():
        for layers in arguments.layers:  # so that there is a growth of ours for the same bytes
            beside[layers] = tuple(pages_of(layers, peer.useful_bytes(layers, pages)) for pages in peer.PAGES)
    return Options(
        backend=arguments.backend,
        layers=arguments.layers,
        runs=arguments.runs,
        repeats=5 if arguments.quick else arguments.repeats,
        sustained_pages=1024 if arguments.quick else 16384,
        memory_bytes=memory_bytes,
        cards=arguments.cards,
        bare=library,
        protocol=not arguments.floor_only,
        profile=arguments.profile,
        beside=beside,
    )


def _memory_bytes(backend: str) -> int:
    if backend == "cuda":
        return int(CARD_SHARE * torch.cuda.mem_get_info(0)[0])
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(HOST_SHARE * available)


def describe(arguments: argparse.Namespace, options: Options) -> dict[str, Any]:
    """Everything that a reader needs to judge the figures."""
    on_card = arguments.backend == "cuda"
    return {
        "benchmark": "growth",
        "command": shlex.join(["scripts/bench_growth.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": __version__,
        "card": torch.cuda.get_device_name(0) if on_card else "host memory",
        "driver": _driver() if on_card else platform.release(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "memory_bytes": options.memory_bytes,
        "cards": options.cards,
        "repeats": options.repeats,
        "cells": [],
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def measure(console: Console, options: Options, ranks: int) -> list[dict[str, Any]]:
    """One rank count in fresh processes, a table per model."""
    cells = world.measure(options, ranks)
    for layers in options.layers:
        tables.growth(console, cells, layers, ranks)
    for cell in cells:
        tables.profile(console, cell)
    return cells


if __name__ == "__main__":
    sys.exit(main())

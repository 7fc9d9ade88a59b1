#!/usr/bin/env python3
"""Two engines on one card, each with a trace of its own: elastic pools against a static split of the same memory.

    scripts/bench_colocation.py --model qwen3 --memory 3 --first conv.csv --second code.csv --json colocation.json

Both ways the KV memory of the card is the same. *Static*: each engine has native pools of half of it. *Elastic*: each
engine may grow to all of it, and a neighbour that holds all other memory of the card leaves no more than that.
Prefix caches are off, so that memory in use is what requests need. Prompts are random tokens with the lengths and the
times of the traces; times are divided by ``--speed``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from serving import load, measure
from serving.load import Answer, Request, random_prompt
from serving.models import MODELS, Model
from serving.server import Server

from kvcached_dist.replay import traces

GIB = 1 << 30
OPTIONS = (
    "--disable-radix-cache", "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
)  # fmt: skip
UTILIZATION = 0.95
KINDS = ("static", "elastic")


def main() -> int:
    """Measure both ways, print, write; 1 when a request failed."""
    arguments = parse()
    model = MODELS[arguments.model]
    loads = [read(path, arguments, seed) for seed, path in enumerate((arguments.first, arguments.second))]
    report = measure.describe("colocation", "scripts/bench_colocation.py")
    report |= {"model": model.name, "tp": arguments.tp, "kv_bytes_per_rank": int(arguments.memory * GIB)}
    report |= {"requests": [len(requests) for requests in loads], "rounds": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        servers = launch(model, arguments, Path(folder), len(loads))
        try:
            everyone = [server for of_kind in servers.values() for server in of_kind]
            for server in everyone:
                server.ready()
            with measure.turn(arguments.turn, everyone):
                for number in range(arguments.rounds):
                    report["rounds"].append(one_round(servers, loads, arguments, KINDS[:: 1 if number % 2 else -1]))
                    if arguments.json:
                        Path(arguments.json).write_text(json.dumps(report) + "\n")
        finally:
            for server in (server for of_kind in servers.values() for server in of_kind):
                server.stop()
    show(Console(width=150, highlight=False), report)
    if arguments.plot:
        plot(arguments.plot, report)
    return 1 if any(found[kind]["errors"] for found in report["rounds"] for kind in KINDS) else 0


def launch(model: Model, arguments: argparse.Namespace, folder: Path, engines: int) -> dict[str, list[Server]]:
    """The engines of both ways, side by side; those that are not asked hold what they hold at idle."""
    whole = int(arguments.memory * GIB) // model.token_bytes(arguments.tp)
    settings = {"KVCACHED_GPU_UTILIZATION": str(UTILIZATION), **dict(arguments.set)}
    return {
        kind: [
            Server.launch(
                f"{kind}-{number}", model, folder, elastic=kind == "elastic", tp=arguments.tp,
                tokens=whole if kind == "elastic" else whole // 2, options=OPTIONS,
                settings=settings if kind == "elastic" else {},
            )
            for number in range(engines)
        ]
        for kind in KINDS
    }  # fmt: skip


def read(path: str, arguments: argparse.Namespace, seed: int) -> list[Request]:
    """A trace as requests: its times and lengths, cut to what the model's context takes."""
    choose = random.Random(seed)
    found = []
    for entry in traces.load(path):
        if entry.arrival_us / 1e6 / arguments.speed > arguments.seconds:
            break
        prompt = random_prompt(choose, min(entry.prompt_tokens, arguments.longest))
        tokens = min(entry.output_tokens, arguments.most)
        found.append(Request(entry.arrival_us / 1e6 / arguments.speed, prompt, tokens))
    return found


def one_round(
    servers: dict[str, list[Server]],
    loads: Sequence[Sequence[Request]],
    arguments: argparse.Namespace,
    order: Sequence[str],
) -> dict[str, Any]:
    """Both ways one after the other, each while the engines of the other way are stopped."""
    found = {}
    for kind in order:
        with contextlib.ExitStack() as others:
            for other in KINDS:
                for server in servers[other] if other != kind else ():
                    others.enter_context(server.paused())
            found[kind] = serve(kind, servers[kind], loads, arguments)
    return found


def serve(
    kind: str, servers: Sequence[Server], loads: Sequence[Sequence[Request]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Both engines under both loads."""
    warm = load.random_requests(32, (100, arguments.longest), (4, 8), seed=99)
    asyncio.run(load.play_all([(server.port, warm) for server in servers], 16))
    time.sleep(2.0)
    # What the engines hold at idle is part of the memory that they share.
    left = int(arguments.memory * GIB) - sum(server.mapped_bytes()[0] for server in servers if server.elastic)
    ballast = take_all_but(left, arguments.tp) if kind == "elastic" else []
    try:
        used = measure.card_used_bytes()
        with measure.watched(servers[0]) as first, measure.watched(servers[1]) as second:
            answers = asyncio.run(
                load.play_all([(server.port, requests) for server, requests in zip(servers, loads, strict=True)])
            )
    finally:
        ballast.clear()
        release()
    return {
        "card_used": used,
        "client": [load.summary(of_one) for of_one in answers],
        "errors": [answer.error for of_one in answers for answer in of_one if answer.error][:5],
        "raw": [[[a.sent, a.ttft, a.chunks[-1]] for a in of_one if not a.error] for of_one in answers],
        "mapped": [[(round(when, 2), bytes_[0]) for when, bytes_ in series] for series in (first, second)],
        "counters": [server.counters() for server in servers],
        "logs": {server.name: server.tail(30) for server in servers if any_error(answers)},
    }


def any_error(answers: Sequence[Sequence[Answer]]) -> bool:
    """Whether a request failed."""
    return any(answer.error for of_one in answers for answer in of_one)


def take_all_but(memory: int, cards: int) -> list[Any]:
    """Hold everything on each card but ``memory`` and the share that must stay free."""
    import torch

    held = []
    for card in range(cards):
        free, total = torch.cuda.mem_get_info(card)
        take = free - memory - int((1 - UTILIZATION) * total)
        held.append(torch.empty(max(0, take), dtype=torch.uint8, device=f"cuda:{card}"))
    return held


def release() -> None:
    """Give back what :func:`take_all_but` held."""
    import torch

    torch.cuda.empty_cache()


def show(console: Console, report: dict[str, Any]) -> None:
    """One table."""
    title = f"two engines, {report['model']}, {report['kv_bytes_per_rank'] / GIB:.1f} GiB of KV memory for both"
    table = Table(title=title, title_justify="left")
    for heading in ("engine", "pools", "served", "failed", "seconds", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms"):
        table.add_column(heading, justify="right")
    for number in (0, 1):
        for kind in KINDS:
            clients = [found[kind]["client"][number] for found in report["rounds"]]
            keys = ("served", "failed", "seconds", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
            table.add_row(str(number), kind, *(spread([client.get(key, 0) for client in clients]) for key in keys))
    console.print(table)
    for found in report["rounds"]:
        for kind in KINDS:
            console.print(kind, found[kind]["counters"], found[kind]["errors"], found[kind]["logs"])


def spread(values: Sequence[float]) -> str:
    """Median, and least to most where they differ."""
    least, most = min(values), max(values)
    middle = f"{statistics.median(values):.4g}"
    return middle if least == most else f"{middle} ({least:.4g} to {most:.4g})"


def plot(path: str, report: dict[str, Any]) -> None:
    """Memory of the elastic engines and time to the first token, over time; of the last round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(9, 9), sharex=True, constrained_layout=True)
    half, last = report["kv_bytes_per_rank"] / 2 / GIB, report["rounds"][-1]
    for number in (0, 1):
        series = last["elastic"]["mapped"][number]
        axes[0].plot([when for when, _ in series], [used / GIB for _, used in series], label=f"engine {number}")
        for kind, mark in (("static", "x"), ("elastic", ".")):
            raw = last[kind]["raw"][number]
            axes[1 + number].plot([sent for sent, _, _ in raw], [first for _, first, _ in raw], mark, label=kind)
        axes[1 + number].set(ylabel=f"engine {number}: TTFT, s", yscale="log")
        axes[1 + number].legend()
    axes[0].axhline(half, color="grey", linestyle="--", label="static: half each")
    axes[0].set(ylabel="mapped KV memory, GiB")
    axes[0].legend()
    axes[2].set(xlabel="seconds")
    figure.savefig(path, dpi=110)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="qwen3")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--memory", type=float, default=3.0, help="GiB of KV memory per card, for both engines")
    parser.add_argument("--first", required=True, help="trace of the first engine")
    parser.add_argument("--second", required=True, help="trace of the second engine")
    parser.add_argument("--seconds", type=float, default=45.0, help="how much of the traces is played")
    parser.add_argument("--speed", type=float, default=1.0, help="the traces' times are divided by this")
    parser.add_argument("--rounds", type=int, default=2, help="times that both ways are measured, in changing order")
    parser.add_argument("--longest", type=int, default=8000, help="longest prompt, tokens")
    parser.add_argument("--most", type=int, default=200, help="most tokens to generate")
    parser.add_argument("--turn", action="append", default=[], help="lock file: measure only while it is held")
    parser.add_argument("--set", type=measure.setting, action="append", default=[], help="NAME=VALUE, elastic engines")
    parser.add_argument("--json", default="", help="write command, machine and raw figures to this file")
    parser.add_argument("--plot", default="", help="write a picture to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

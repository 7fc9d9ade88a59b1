#!/usr/bin/env python3
"""The real engine on cards: native pools against elastic ones, in one run, with its own attention kernels.

    scripts/bench_sglang_gpu.py --models qwen3,deepseek_v4 --rounds 2 --json docs/benchmarks/data/sglang-h200.json
    scripts/bench_sglang_gpu.py --models qwen3 --modes graphs --tp 2
    scripts/bench_sglang_gpu.py --models qwen3 --modes graphs --together --rounds 30 --requests 120
    scripts/bench_sglang_gpu.py --models qwen3 --modes graphs --apart --rounds 20 --requests 900 --skip-s 3

For every model one native and one elastic server stand side by side on the card, both idle but for the one that is
asked. First both answer the same requests: greedy tokens must be equal, and how far their log probabilities differ is
shown. Then the same load goes to one and the other in turn, in changing order, while the other one is stopped, and the
prefix cache is flushed after each, so that the elastic pools grow from nothing every time. Rounds of the same kind
differ by the noise of the machine, which comes in waves: what is compared are the two loads of one round, which follow
each other, and the ratios of all rounds give a median and its 95 % interval (bootstrap). Many short rounds say more
than few long ones. With ``--together`` both are asked at the same time instead (:mod:`serving.race`).

``--apart`` needs twice as many cards: a native and an elastic server stand on each set of cards, and the native one of
one set and the elastic one of the other are asked at the same time, crosswise from round to round. Nothing is shared
but what disturbs the machine, and what a set of cards and its processors are faster by than the other cancels in the
geometric mean of two rounds, of which the ratios are made. This says most. ``--skip-s`` gives another table without the
seconds in which pools grow from nothing, ``--steps`` one of where the time of a step goes (:mod:`serving.steps`).

A process is a few percent faster or slower than another one of the same kind for all its life. ``--servers 3`` starts
so many of each kind and asks every native one against every elastic one in turn; ``--pin`` gives the thread that runs
the engine's steps a processor of its own, the same one in all servers. ``--slices 1`` lets the two servers of a round
take turns of a second (:mod:`serving.slices`): what disturbs the machine for longer then disturbs both.

``--syncs`` counts instead where steps wait for the device, by torch's own warnings (:mod:`serving.syncs`): no place of
this library may be among what every step does.

*returned* is the time from the flush until 95 % of the memory that the load had mapped is back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from serving import budget, equality, measure, steps, syncs
from serving.load import Request, random_requests
from serving.models import MODELS, Model
from serving.race import Race, two_clients
from serving.server import Server
from serving.slices import in_slices

EAGER = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")
GRAPHS = (
    "--cuda-graph-config",
    json.dumps({"decode": {"backend": "full", "bs": [1, 2, 4, 8, 16, 32]}, "prefill": {"backend": "disabled"}}),
)
KINDS = ("native", "elastic")
DEGENERATE = 8
"""So many different tokens in an answer say little about what it was computed from."""

INSIDE_WRITTEN_S = 2.0
"""Servers write what they say of themselves at least this often."""

T = TypeVar("T")

SHOWN = ("requests_per_s", "tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "gap_p99_ms")


def main() -> int:
    """Measure, print, write; 1 when tokens differ or a request failed."""
    arguments = parse()
    console = Console(width=140, highlight=False)
    report = measure.describe("sglang", "scripts/bench_sglang_gpu.py")
    report["cells"] = []
    kinds = [(MODELS[name], mode == "graphs") for mode in arguments.modes for name in arguments.models]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:

        def save() -> None:
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(report) + "\n")

        for model, graphs in kinds:
            found: dict[str, Any] = {"model": model.name, "tp": arguments.tp, "graphs": graphs}
            report["cells"].append(found)
            cell(console, model, found, arguments, Path(folder), save)
            save()
    return 1 if any(bad(found) for found in report["cells"]) else 0


def bad(found: dict[str, Any]) -> bool:
    """Whether a cell says that something is wrong."""
    failed = any(run["client"]["failed"] for runs in found.get("runs", {}).values() for run in runs)
    tokens = found.get("tokens", {})
    degenerate = bool(tokens) and min(tokens["distinct"].values()) <= DEGENERATE
    return bool(found.get("failure") or failed or tokens.get("different") or tokens.get("errors_at_once") or degenerate)


def cell(
    console: Console,
    model: Model,
    found: dict[str, Any],
    arguments: argparse.Namespace,
    folder: Path,
    save: Callable[[], None],
) -> None:
    """One model, with captured graphs or without; what is known so far is saved as it comes."""
    graphs = found["graphs"]
    label = f"{model.name}-{'graphs' if graphs else 'eager'}"
    title = f"{model.name}, TP {arguments.tp}, {'captured graphs' if graphs else 'eager'}"
    servers: dict[tuple[str, int], Server] = {}

    def from_inside(read: Callable[[Path, Iterable[str]], T]) -> dict[str, T]:
        """What servers of each kind say of themselves, as far as it is written."""
        return {
            kind: read(folder, [f"inside-{label}-{kind}-{place}" for of, place in servers if of == kind])
            for kind in KINDS
        }

    try:
        for place in range(2 if arguments.apart else arguments.servers):
            for kind in KINDS:
                servers[kind, place] = Server.launch(
                    f"{label}-{kind}-{place}",
                    model,
                    folder,
                    elastic=kind == "elastic",
                    tp=arguments.tp,
                    cards=cards_of(place, arguments),
                    options=GRAPHS if graphs else EAGER,
                    settings={
                        **(dict(arguments.set) if kind == "elastic" else {}),
                        **(
                            steps.inside(f"inside-{label}-{kind}-{place}") if arguments.steps or arguments.syncs else {}
                        ),
                        **(steps.environment(folder) if arguments.steps else {}),
                        **(syncs.environment(folder) if arguments.syncs else {}),
                    },
                )
        for (kind, place), server in servers.items():
            found[f"ready_{kind}_{place}_s"] = server.ready()
        if arguments.pin:
            pin(servers.values(), arguments.tp)
        with measure.turn(arguments.turn, servers.values()):
            found["card_used"] = measure.card_used_bytes()
            found["tokens"] = equality.compare(*(equality.tokens(servers[kind, 0]) for kind in KINDS))
            save()
            found["budget"] = after_a_load(servers, model, arguments)
            found["runs"] = {kind: [] for kind in KINDS}
            if arguments.syncs:
                time.sleep(2 * INSIDE_WRITTEN_S)
            waits = from_inside(syncs.read)
            for kind, run in rounds(servers, model, arguments):
                found["runs"][kind].append(run)
                if arguments.steps:
                    found["steps"] = from_inside(steps.read)
                save()
        pools = servers["elastic", 0].states()[0]["pools"]
        found["pools"] = {name: pool["static_bytes"] for name, pool in pools.items()}
        show(console, title, found, arguments.apart)
        if arguments.steps or arguments.syncs:
            time.sleep(2 * INSIDE_WRITTEN_S)
        if arguments.steps:
            found["steps"] = from_inside(steps.read)
            console.print(step_table(found["steps"]))
        if arguments.syncs:
            heard = {kind: now.since(waits[kind]) for kind, now in from_inside(syncs.read).items()}
            found["syncs"] = {kind: {"steps": of.steps, "places": of.places} for kind, of in heard.items()}
            console.print(syncs.table(heard), f"asked for by this library: {dict(heard['elastic'].ours()) or 'none'}")
    except Exception as error:
        found["failure"] = str(error)[-4000:]
        found["logs"] = {server.name: server.tail(60) for server in servers.values()}
        console.print(f"[bold]{title}: failed[/]\n{found['failure']}")
    finally:
        for server in servers.values():
            server.stop()


def rounds(
    servers: dict[tuple[str, int], Server], model: Model, arguments: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Loads in turn; the first one of each kind warms up and is left out."""
    number, parallel = load_of(model, arguments)
    with contextlib.ExitStack() as stack:
        race = stack.enter_context(Race.between()) if arguments.together or arguments.apart else None
        clients = stack.enter_context(two_clients()) if arguments.slices else None
        warm_ups = 2 if arguments.apart else arguments.servers
        for turn in range(arguments.rounds + warm_ups):
            counts = turn >= warm_ups
            requests = random_requests(number if counts else number // 4, (100, 2000), (24, 48), seed=turn)
            swapped = turn % 2 == 1
            if race is None:
                # Each native server meets each elastic one.
                cycle, place = divmod(turn, arguments.servers)
                asked = {
                    "native": servers["native", place],
                    "elastic": servers["elastic", (place + cycle) % arguments.servers],
                }
                swapped = cycle % 2 == 1
                if clients is not None:
                    with others_paused(servers, asked):
                        found = in_slices(clients, asked, requests, parallel, arguments.slices, swapped=swapped)
                else:
                    found = one_after_the_other(asked, servers, requests, parallel, swapped)
            else:
                places = {"native": int(swapped), "elastic": int(not swapped)} if arguments.apart else {}
                asked = {kind: servers[kind, places.get(kind, 0)] for kind in KINDS}
                with others_paused(servers, asked):
                    found = race.run(asked, requests, parallel, swapped=swapped, from_s=arguments.skip_s)
            yield from found.items() if counts else ()


def load_of(model: Model, arguments: argparse.Namespace) -> tuple[int, int]:
    """Requests of a load, and how many are in flight."""
    slow = model.name.startswith("deepseek_v4")
    return arguments.requests or (96 if slow else 640), 16 if slow else 32


def after_a_load(servers: dict[tuple[str, int], Server], model: Model, arguments: argparse.Namespace) -> dict[str, Any]:
    """What an elastic server keeps that is idle and not flushed, while all others are stopped."""
    asked = servers["elastic", 0]
    number, parallel = load_of(model, arguments)
    with others_paused(servers, {"elastic": asked}):
        return budget.down_to_the_budget(asked, random_requests(number, (100, 2000), (24, 48), seed=0), parallel)


def one_after_the_other(
    asked: dict[str, Server],
    servers: dict[tuple[str, int], Server],
    requests: list[Request],
    parallel: int,
    swapped: bool,
) -> dict[str, dict[str, Any]]:
    """A load on one of two servers while all others are stopped, then on the other one."""
    found = {}
    for kind in KINDS if swapped else KINDS[::-1]:
        with others_paused(servers, {kind: asked[kind]}):
            found[kind] = measure.loaded(asked[kind], requests, parallel)
    return found


@contextlib.contextmanager
def others_paused(servers: dict[tuple[str, int], Server], asked: dict[str, Server]) -> Iterator[None]:
    """All servers but these are stopped meanwhile."""
    with contextlib.ExitStack() as others:
        for server in servers.values():
            if server not in asked.values():
                others.enter_context(server.paused())
        yield


def pin(servers: Iterable[Server], ranks: int) -> None:
    """A processor for the steps of each rank, the same ones in all servers: only one of these is asked at a time."""
    usable = sorted(os.sched_getaffinity(0))
    own, others = usable[1 : 1 + ranks], usable[:1] + usable[1 + ranks :]
    for server in servers:
        server.pin_schedulers(own)
    os.sched_setaffinity(0, others)


def cards_of(place: int, arguments: argparse.Namespace) -> Sequence[int]:
    """Cards of the servers with this number; none named: the first ones."""
    return range(place * arguments.tp, (place + 1) * arguments.tp) if arguments.apart else ()


def show(console: Console, title: str, found: dict[str, Any], apart: bool) -> None:
    """Tables: medians, and the spread of the rounds; of whole loads, and of their steady part."""
    for part in ("client", "steady"):
        if part not in found["runs"]["native"][0]:
            continue
        table = Table(title=title if part == "client" else f"{title}, steady", title_justify="left")
        for heading in ("", "native", "elastic", "elastic / native, 95 %"):
            table.add_column(heading, justify="right" if heading else "left")
        for key in SHOWN:
            of = {kind: [run[part].get(key, float("nan")) for run in runs] for kind, runs in found["runs"].items()}
            cells = [
                f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" for values in of.values()
            ]
            ratios = compared(of["native"], of["elastic"], crosswise=apart)
            low, high = measure.interval(ratios)
            table.add_row(key, *cells, f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
        console.print(table)
    console.print(equality.in_words(found["tokens"]))
    console.print({key: value for key, value in found["budget"].items() if key not in ("series", "client")})
    for run in found["runs"]["elastic"]:
        console.print(f"elastic: {memory_of(run)}{run['counters']}")


def step_table(found: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """Medians per kind of step."""
    table = Table(title="steps, medians in ms", title_justify="left")
    for heading in ("", "", "steps", "share", "launch to launch", *steps.PARTS, "waits"):
        table.add_column(heading, justify="right" if heading else "left")
    for step in sorted({step for of_kind in found.values() for step in of_kind}):
        for kind in KINDS:
            if (row := found[kind].get(step)) is not None:
                numbers = (row[part] for part in ("share", "step", *steps.PARTS, "waits"))
                table.add_row(step, kind, str(row["steps"]), *(f"{number:.3f}" for number in numbers))
    return table


def compared(native: Sequence[float], elastic: Sequence[float], *, crosswise: bool) -> list[float]:
    """Ratios of the rounds; of rounds that were crosswise, the geometric mean of each two."""
    ratios = [mine / theirs if theirs else math.nan for theirs, mine in zip(native, elastic, strict=True)]
    if not crosswise:
        return ratios
    return [math.sqrt(one * other) for one, other in zip(ratios[::2], ratios[1::2], strict=False)]


def memory_of(run: dict[str, Any]) -> str:
    """What became of memory in a load of its own; nothing is known of loads side by side."""
    if "memory" not in run:
        return ""
    memory, stalls = run["memory"], run["counters"].get("grow_foreground", 0)
    return (
        f"idle {mib(memory['idle'])}, peak {mib(memory['peak'])}, after {mib(memory['after'])} MiB;"
        f" 95 % back after {memory['returned_95_s'] and round(memory['returned_95_s'], 2)} s;"
        f" {stalls} foreground growths in {run['steps']} steps; "
    )


def mib(values: list[int]) -> str:
    """Bytes per rank as MiB."""
    return "/".join(str(value >> 20) for value in values)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names, default=["qwen3", "deepseek_v4"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the engine, one card each")
    parser.add_argument(
        "--modes", type=modes, default=["eager", "graphs"], help="eager, graphs (captured decode graphs)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="with --apart an even number")
    parser.add_argument("--requests", type=int, default=0, help="per load; default 640, DeepSeek-V4 96")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--together", action="store_true", help="ask both servers at the same time, on the same cards")
    way.add_argument("--apart", action="store_true", help="ask both at the same time, each on cards of its own")
    parser.add_argument(
        "--skip-s", type=float, default=0.0, help="with --together or --apart: seconds that the steady state leaves out"
    )
    parser.add_argument("--servers", type=int, default=1, help="of each kind, side by side; not with other ways")
    parser.add_argument("--pin", action="store_true", help="the thread that runs the steps has a processor of its own")
    parser.add_argument("--slices", type=float, default=0.0, help="seconds of a turn, with --pin")
    parser.add_argument("--steps", action="store_true", help="time the engine's steps from inside")
    parser.add_argument(
        "--syncs",
        action="store_true",
        help="count where the engine's steps wait for the device; times mean nothing then",
    )
    parser.add_argument("--turn", action="append", default=[], help="lock file: measure only while it is held")
    parser.add_argument("--set", type=measure.setting, action="append", default=[], help="NAME=VALUE, elastic server")
    parser.add_argument("--json", default="", help="write command, machine and raw figures to this file")
    arguments = parser.parse_args()
    if arguments.apart and (arguments.rounds < 2 or arguments.rounds % 2):
        parser.error(f"--rounds {arguments.rounds}: --apart compares two rounds at a time, choose an even number")
    if (arguments.together or arguments.apart) and (arguments.servers > 1 or arguments.pin):
        parser.error("--servers and --pin are for servers that are asked one after the other")
    if arguments.slices and not arguments.pin:
        parser.error("--slices without --pin: the two servers of a round would run on different processors")
    return arguments


def modes(text: str) -> list[str]:
    """Comma-separated ways to run a decode step."""
    chosen = text.split(",")
    if unknown := [mode for mode in chosen if mode not in ("eager", "graphs")]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: known are eager, graphs")
    return chosen


def names(text: str) -> list[str]:
    """Comma-separated model names."""
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in MODELS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: known are {', '.join(MODELS)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())

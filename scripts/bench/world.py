"""Starts the rank processes of every rank count and puts their figures together."""

from __future__ import annotations

import multiprocessing as mp
import queue
from collections import defaultdict
from typing import Any

from kvcached_dist.coord.links.store import connect_store

from . import parts as cuts
from . import rank
from .plan import Options
from .samples import slowest, summary
from .seams import GROWTH, SUSTAINED

SILENCE_S = 600.0


def measure(options: Options, ranks: int) -> list[dict[str, Any]]:
    """All cells of one rank count.

    Args:
        options: what to measure.
        ranks: rank processes at once, on one card or on host memory.

    Raises:
        RuntimeError: a rank failed; the text is its traceback.
    """
    context = mp.get_context("spawn")
    server = connect_store("127.0.0.1", 0, True, ranks, 30)
    barrier, results = context.Barrier(ranks), context.Queue()
    processes = [
        context.Process(target=rank.run, args=(options, ranks, r, server.port, barrier, results), daemon=True)
        for r in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(ranks, results)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.terminate()
                process.join(10)


def _collect(ranks: int, results: Any) -> list[dict[str, Any]]:
    parts: dict[tuple[int, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    cells: list[dict[str, Any]] = []
    ended = 0
    while ended < ranks:
        try:
            number, part = results.get(timeout=SILENCE_S)
        except queue.Empty:
            raise RuntimeError(f"no rank of {ranks} has reported for {SILENCE_S:.0f} s") from None
        if part is None:
            ended += 1
            continue
        if "error" in part:
            raise RuntimeError(f"rank {number} of {ranks} failed:\n{part['error']}")
        key = (part["cell"]["layers"], part["cell"]["run_pages"])
        parts[key][number] = part
        if "skipped" in part:
            cells.append({**part["cell"], "skipped": part["skipped"]})
        elif len(parts[key]) == ranks:
            cells.append(joined([parts[key][r] for r in range(ranks)]))
    return cells


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One cell from the figures of its ranks: of the floor the slowest rank counts, of ours the leader's verdict."""
    first = parts[0]
    cell = dict(first["cell"])
    floors = [part["floor"] for part in parts]
    cell["extents"] = floors[0]["extents"]
    cell["extents_sustained"] = floors[0]["extents_sustained"]
    cell["extent_bytes"] = sum(first["extent_bytes"])
    cell["floor"] = {
        name: summary(slowest([f[f"{name}_us"] for f in floors])) for name in ("grow", "reserve", "reclaim")
    }
    cell["floor"]["sustained_us"] = max(sum(f["sustained_us"]) for f in floors)
    if "bare" in first:
        cell["bare"] = {
            name: summary(slowest([part["bare"][f"{name}_us"] for part in parts])) for name in ("grow", "reclaim")
        }
    if "ours" in first:
        ours = first["ours"]
        cell["ours"] = {"grow": summary(ours["grow_us"]), "reclaim": summary(ours["reclaim_us"])}
        cell["ours"]["sustained_us"] = sum(ours["sustained_us"])
        cell["ours"]["sustained"] = summary(ours["sustained_us"])
    if "lock_step" in first:
        cell["profile"] = {"floor": _floor_profile(parts)}
        if "ours" in first:
            expected = {GROWTH: cell["repeats"], SUSTAINED: cell["sustained_runs"]}
            cell["profile"] |= cuts.profile([part["notes"] for part in parts], expected)
    _rates(cell)
    return cell


def _floor_profile(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The floor's driver work by the names that ours has: alone, in a row, and in a row in lock step."""
    floors, steps = [part["floor"] for part in parts], [part["lock_step"] for part in parts]

    def plain(whole: str, reserve: str, meets: bool) -> dict[str, Any]:
        wholes, reserves = [floor[whole] for floor in floors], [floor[reserve] for floor in floors]
        maps = [
            [all_of - part for all_of, part in zip(*both, strict=True)] for both in zip(wholes, reserves, strict=True)
        ]
        return cuts.floor_figures(wholes, reserves, maps, meets=meets)

    in_step = ([step[name] for step in steps] for name in ("sustained_us", "reserve_us", "map_us"))
    return {
        GROWTH: plain("grow_us", "reserve_us", meets=True),
        SUSTAINED: plain("sustained_us", "sustained_reserve_us", meets=False),
        cuts.LOCK_STEP: cuts.floor_figures(*in_step, meets=True),
    }


def _rates(cell: dict[str, Any]) -> None:
    """Useful bytes per second of sustained growth, and the targets: 1.25 x floor + 0.5 ms, 0.8 of the floor."""
    useful = cell["useful_bytes"] * cell["sustained_runs"]
    floor = cell["floor"]
    floor["gb_per_s"] = useful / floor["sustained_us"] / 1000
    if "ours" not in cell:
        return
    ours = cell["ours"]
    ours["gb_per_s"] = useful / ours["sustained_us"] / 1000
    limit = 1.25 * floor["grow"]["p50_us"] + 500
    back_limit = 1.25 * floor["reclaim"]["p50_us"] + 500
    cell["targets"] = {
        "grow_limit_us": round(limit, 1),
        "grow_met": ours["grow"]["p50_us"] <= limit,
        "reclaim_limit_us": round(back_limit, 1),
        "reclaim_met": ours["reclaim"]["p50_us"] <= back_limit,
        "sustained_ratio": round(ours["gb_per_s"] / floor["gb_per_s"], 3),
        "sustained_met": ours["gb_per_s"] >= 0.8 * floor["gb_per_s"],
    }

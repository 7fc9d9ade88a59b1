"""What an idle engine keeps when its prefix cache is not flushed: its budget, and the runs in which that lies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvcached_dist.config import Config

from . import equality, load
from .load import Request
from .measure import SAMPLE_S, watched
from .server import Server

LONGEST_S, STILL_S = 30.0, 6.0
"""How long memory may take to come back, and after how long without a change no more is expected."""

HITS = 8
"""Prompts that are asked again."""

FULL = "full"
"""The domain of tokens that attend to all before them."""


def down_to_the_budget(server: Server, requests: Sequence[Request], parallel: int) -> dict[str, Any]:
    """A load without a flush after it: how fast, and how far, memory goes back to what the prefix cache may keep.

    Args:
        server: an elastic one; flushed at the end.
        requests: of more tokens than the budget of the prefix cache.
        parallel: requests in flight.

    Returns:
        What may stay (``budget_tokens`` in the cache, and the ``reserve_tokens`` of the null page and of the free pages
        that an idle engine keeps; ``allowed_bytes`` of both per rank, without what granules round up); ``peak`` mapped
        bytes of all pools per rank under load; what full attention had in the first snapshot ``after_load`` (an idle
        engine writes one a second) and at the end (``after``): ``published`` tokens, those ``in_use``, and
        ``mapped_bytes`` per rank; seconds from the last answer until what is in use is within the budget
        (``evicted_s``) and what is published within budget and reserve (``returned_s``), ``None`` where that was not
        reached; a ``series`` of what was seen; and how the last prompts are answered from what the cache keeps
        (:func:`equality.from_the_cache`).

    Raises:
        RuntimeError: there are no snapshots after the load.
    """
    with watched(server) as mapped:
        answers = load.play(server.port, requests, parallel)
    series = _until_nothing_changes(server)
    budget = Config.from_env(server.settings).max_cached_tokens
    reserve = _reserve_tokens(server)
    held = _bytes(server, "static_bytes")
    hits = equality.from_the_cache(server, [request.prompt for request in requests[-HITS:]])
    server.flush()
    return {
        "client": load.summary(answers),
        "budget_tokens": budget,
        "reserve_tokens": reserve,
        "allowed_bytes": [round(of_rank * (budget + reserve) / server.capacity_tokens) for of_rank in held],
        "peak": [max(of_rank) for of_rank in zip(*(sample for _, sample in mapped), strict=True)],
        "after_load": series[0],
        "after": series[-1],
        "evicted_s": _first(series, "in_use", budget),
        "returned_s": _first(series, "published", budget + reserve),
        "hits": hits,
        "series": series[:: max(1, len(series) // 40)],
    }


def _until_nothing_changes(server: Server) -> list[dict[str, Any]]:
    """Samples from the first snapshot on that is younger than this call."""
    begin, ended = time.perf_counter(), time.time()
    while min(state["updated"] for state in server.states()) < ended:
        if time.perf_counter() > begin + LONGEST_S:
            raise RuntimeError(f"server {server.name} writes no snapshots any more:\n{server.tail()}")
        time.sleep(SAMPLE_S)
    series = [_sample(server, begin)]
    changed = series[0]["at_s"]
    while series[-1]["at_s"] < min(LONGEST_S, changed + STILL_S):
        time.sleep(SAMPLE_S)
        series.append(_sample(server, begin))
        if any(series[-1][key] != series[-2][key] for key in ("published", "in_use", "mapped_bytes")):
            changed = series[-1]["at_s"]
    return series


def _sample(server: Server, begin: float) -> dict[str, Any]:
    """Memory of full attention now, in tokens and per rank in bytes."""
    domain = server.states()[0]["domains"][FULL]
    tokens = _block_tokens(server, domain)
    return {
        "at_s": round(time.perf_counter() - begin, 3),
        "published": domain["published"] * tokens,
        "in_use": (domain["published"] - domain["free"] - 1) * tokens,
        "mapped_bytes": _bytes(server, "mapped_bytes"),
    }


def _block_tokens(server: Server, domain: Mapping[str, Any]) -> int:
    return round(server.capacity_tokens / (int(domain["blocks"]) - 1))


def _reserve_tokens(server: Server) -> int:
    """Of the null page and of the free pages that an idle engine keeps."""
    domain = server.states()[0]["domains"][FULL]
    pages = Config.from_env(server.settings).min_reserved_pages + 1
    return pages * int(domain["blocks_per_page"]) * _block_tokens(server, domain)


def _bytes(server: Server, key: str) -> list[int]:
    """Per rank, the sum of its pools of full attention."""
    return [sum(pool[key] for pool in state["pools"].values() if pool["domain"] == FULL) for state in server.states()]


def _first(series: Sequence[Mapping[str, Any]], key: str, most: int) -> float | None:
    """When this was first not more."""
    return next((sample["at_s"] for sample in series if sample[key] <= most), None)

"""What a snapshot says: plain data that tools of other versions and languages can read as JSON.

Keys are only added within a ``schema`` number; a reader must live with keys that are missing.
For every pool::

    virtual_bytes   addresses that are reserved; costs no memory
    mapped_bytes    physical memory that is mapped: published pages, null and sentinel pages, and what is retained
    reserved_bytes  handles held that nothing maps yet (a growth between RESERVE and MAP, an UNMAP before RELEASE)
    retained_bytes  the part of mapped_bytes that is not published: left by a mapping that failed on some rank
    limit_bytes     most physical bytes this pool may hold; 0 for no limit
    static_bytes    what the engine's own pool of the same capacity would hold all the time

so a pool holds ``mapped_bytes + reserved_bytes`` of physical memory. For every domain, in blocks::

    blocks          logical capacity, the null block included
    published       backed and usable, free or in use; the null block included: whole pages are counted
    free            published and free; never the null block
    growable        what every rank could still back

so ``published - free - 1`` blocks are in use, whoever allocates them. ``runtime_pools`` are bytes per pool that the
engine keeps for itself on this device beside elastic ones: subtracted from what these may use. Where nothing is elastic
``native_because`` says why, ``runtime_pools`` are all the engine has built, and there is no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NotRequired, TypedDict

SCHEMA: Final = 1
"""Number of this schema; goes up when a key changes its meaning."""


class PoolState(TypedDict):
    """One pool on one rank."""

    domain: str
    virtual_bytes: int
    mapped_bytes: int
    reserved_bytes: int
    retained_bytes: int
    limit_bytes: int
    static_bytes: int


class DomainState(TypedDict):
    """One id space; equal on all ranks at equal steps, apart from ``first_cause``."""

    blocks: int
    blocks_per_page: int
    published: int
    free: int
    growable: int
    health: str
    first_cause: str | None


class CounterState(TypedDict, total=False):
    """Counts since start; they only grow. A rank has those that it can know."""

    grow_foreground: int
    grow_background: int
    grow_aborted: int
    refused: int
    reclaimed_runs: int
    misses: int
    queries: int


class DeviceState(TypedDict):
    """The physical card of the rank. ``total`` and ``free`` are bytes, of all engines on it."""

    card_id: str
    total: int
    free: int


class SnapshotState(TypedDict):
    """One rank of one engine."""

    schema: int
    name: str
    rank: int
    tp: int
    pp: int
    pid: int
    started: float
    updated: float
    epoch: int
    step: int
    failure: str | None
    pools: dict[str, PoolState]
    domains: dict[str, DomainState]
    counters: CounterState
    device: DeviceState
    runtime_pools: dict[str, int]
    native_because: NotRequired[str]
    log: list[str]


BYTE_KEYS: Final = (
    "virtual_bytes",
    "mapped_bytes",
    "reserved_bytes",
    "retained_bytes",
    "limit_bytes",
    "static_bytes",
)


def pool_totals(state: Mapping[str, object]) -> dict[str, int]:
    """Sums of the pools of one rank, per key of :data:`BYTE_KEYS`; unlimited pools add nothing to the limit."""
    totals = dict.fromkeys(BYTE_KEYS, 0)
    pools = state.get("pools")
    for pool in pools.values() if isinstance(pools, Mapping) else ():
        if isinstance(pool, Mapping):
            for key in BYTE_KEYS:
                value = pool.get(key)
                totals[key] += value if isinstance(value, int) else 0
    return totals


__all__ = [
    "BYTE_KEYS",
    "SCHEMA",
    "CounterState",
    "DeviceState",
    "DomainState",
    "PoolState",
    "SnapshotState",
    "pool_totals",
]

"""The settings as a table: name, default, what may be given, meaning. ``config.py`` reads, checks and combines them.

Three groups, each a base of the next one, so that all of it is one dataclass in the order of ``docs/settings.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .setting_kinds import (
    LOG_LEVEL,
    AbsolutePath,
    Bytes,
    Choice,
    EngineName,
    Fraction,
    Integer,
    Seconds,
    Switch,
    Text,
    setting_field,
)

MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class KnownSettings:
    """Names that users of kvcached know."""

    enabled: bool = setting_field(
        False,
        "ENABLE_KVCACHED",
        Switch(empty_is_off=True),
        "Elastic KV memory on. Off: the engine plugin registers nothing and the engine keeps its own pools.",
    )
    autopatch: bool = setting_field(
        True,
        "KVCACHED_AUTOPATCH",
        Switch(),
        "Take the engine's pools over by itself when the plugin is loaded; off for manual integrations.",
    )
    require: bool = setting_field(
        False,
        "KVCACHED_REQUIRE",
        Switch(),
        "An engine or topology that cannot be made elastic fails at start instead of keeping its own pools.",
    )
    sglang_dsv4_kv_pool_bridge: bool = setting_field(
        True,
        "KVCACHED_SGLANG_DSV4_KV_POOL_BRIDGE",
        Switch(),
        "Take over the DeepSeek-V4 pools of SGLang (SWA, C4, C128, indexer and compressor state).",
        world=True,
    )
    sglang_dsv4_runtime_reservation: bool = setting_field(
        True,
        "KVCACHED_SGLANG_DSV4_RUNTIME_RESERVATION",
        Switch(),
        "Subtract pools that SGLang builds for itself beside elastic ones (a draft pool that could not be described,"
        " the split FP4 indexer of DeepSeek-V4, whatever else is not taken over) from what elastic pools may use, pool"
        " by pool with their exact bytes. Off: nothing is registered. Without effect where all pools stay native.",
        world=True,
    )
    page_size_mb: int = setting_field(
        2,
        "KVCACHED_PAGE_SIZE_MB",
        Integer(2, 2, multiple_of=2),
        "Smallest interior extent: physical memory is created in pieces of at least this size.",
        "MiB",
        world=True,
    )
    contiguous_layout: bool | None = setting_field(
        None,
        "KVCACHED_CONTIGUOUS_LAYOUT",
        Switch(optional=True),
        "Accepted without effect: buffers always have the engine's own layout. One warning when it is set.",
    )
    gpu_utilization: float = setting_field(
        0.95,
        "KVCACHED_GPU_UTILIZATION",
        Fraction(0.95),
        "Part of the device's memory that may be used; (1 - value) x total always stays free.",
    )
    min_reserved_pages: int = setting_field(
        5,
        "KVCACHED_MIN_RESERVED_PAGES",
        Integer(0, 5, 1 << 30),
        "Growth in the background starts when a domain has fewer free published pages than this.",
        "pages",
        world=True,
    )
    max_reserved_pages: int = setting_field(
        10,
        "KVCACHED_MAX_RESERVED_PAGES",
        Integer(0, 10, 1 << 30),
        "Reclaim leaves this many free published pages while the engine is busy, and KVCACHED_MIN_RESERVED_PAGES at"
        " idle. 0 with a minimum of 0 maps on demand.",
        "pages",
        world=True,
    )
    ipc_name: str = setting_field(
        "",
        "KVCACHED_IPC_NAME",
        EngineName(),
        "Name of the engine for tools, used exactly. Empty: a name that is unique across containers is generated.",
        world=True,
    )
    ipc_timeout_s: float = setting_field(
        60.0,
        "KVCACHED_IPC_TIMEOUT",
        Seconds(60),
        "Longest exchange with the store or another rank outside of a transaction.",
        "s",
    )
    log_level: str = setting_field(
        "INFO",
        "KVCACHED_LOG_LEVEL",
        LOG_LEVEL,
        "Level of the logger `kvcached_dist`, set when a coordinator starts if it was given; otherwise the logging of"
        " the application decides.",
    )
    physical_growth_lock_dir: str = setting_field(
        "/tmp",
        "KVCACHED_PHYSICAL_GROWTH_LOCK_DIR",
        AbsolutePath("/tmp"),
        "Directory of the admission turns: the same real directory for all engines that share a card.",
    )
    max_cached_tokens: int = setting_field(
        16_000,
        "KVCACHED_MAX_CACHED_TOKENS",
        Integer(None, 16_000),
        "Budget of the prefix cache; what is above it is evicted by the log. SGLang keeps to it at idle and when memory"
        " is short, the replay always. Below 0: no limit, 0: nothing is kept.",
        "tokens",
        world=True,
    )


@dataclass(frozen=True, kw_only=True)
class ProtocolSettings(KnownSettings):
    """How ranks agree, for how long they wait, and how much is grown at once."""

    beat_s: float = setting_field(
        1.0, "KVCACHED_DIST_BEAT_S", Seconds(1), "Interval of the beats on each link.", "s", world=True
    )
    growth_deadline_s: float = setting_field(
        2.0,
        "KVCACHED_DIST_GROWTH_DEADLINE_S",
        Seconds(2),
        "A growth without all answers after this time is a miss (or stays pending once mapping has begun).",
        "s",
        world=True,
    )
    lease_s: float = setting_field(
        30.0,
        "KVCACHED_DIST_LEASE_S",
        Seconds(30),
        "A rank without a beat for this long is lost. Native calls can hold the interpreter for many seconds.",
        "s",
        world=True,
    )
    drain_deadline_s: float = setting_field(
        10.0,
        "KVCACHED_DIST_DRAIN_DEADLINE_S",
        Seconds(10),
        "A retirement that has not drained after this time is cancelled; nobody is lost for it.",
        "s",
        world=True,
    )
    parked_s: float = setting_field(
        30.0,
        "KVCACHED_DIST_PARKED_S",
        Seconds(30),
        "SGLang: a chunk of a prompt that has found no memory for this long, with nothing else running, ends: its"
        " request is aborted on all ranks.",
        "s",
        world=True,
    )
    compaction: bool = setting_field(
        True,
        "KVCACHED_DIST_COMPACTION",
        Switch(),
        "SGLang: what the prefix cache keeps is moved together when the engine is idle, so that the memory between"
        " cached tokens goes back. Off: it stays where it is, and runs with a cached token in them stay mapped.",
        world=True,
    )
    start_timeout_s: float = setting_field(
        600.0, "KVCACHED_DIST_START_TIMEOUT_S", Seconds(600), "Longest wait for all ranks at start.", "s", world=True
    )
    map_retries: int = setting_field(
        2,
        "KVCACHED_DIST_MAP_RETRIES",
        Integer(0, 2, 16),
        "Identical retries of a failed mapping before its runs are quarantined.",
        world=True,
    )
    run_pages_min: int = setting_field(
        1,
        "KVCACHED_DIST_RUN_PAGES_MIN",
        Integer(1, 1, 1 << 20),
        "Pages of the first run that is grown after a pause.",
        "pages",
        world=True,
    )
    run_pages_max: int = setting_field(
        64,
        "KVCACHED_DIST_RUN_PAGES_MAX",
        Integer(1, 64, 1 << 20),
        "Longest run until growth has lasted; beyond that see KVCACHED_DIST_RUN_SHARE.",
        "pages",
        world=True,
    )
    run_share: int = setting_field(
        4,
        "KVCACHED_DIST_RUN_SHARE",
        Integer(0, 4, 1 << 20),
        "Where growth goes on beyond the longest run, runs are one part in so many of what is held; 0: never longer.",
        world=True,
    )


@dataclass(frozen=True, kw_only=True)
class MachineSettings(ProtocolSettings):
    """The host backend, limits and files of this machine, and what tests need."""

    host_granule_bytes: int = setting_field(
        2 * MIB,
        "KVCACHED_DIST_HOST_GRANULE_BYTES",
        Bytes(4096, "2M", power_of_two=True),
        "Mapping granule of the host backend.",
        "bytes",
        world=True,
    )
    host_capacity_bytes: int = setting_field(
        2 * GIB,
        "KVCACHED_DIST_HOST_CAPACITY_BYTES",
        Bytes(4096, "2G"),
        "Physical capacity of the host backend, per rank.",
        "bytes",
    )
    physical_limit_bytes: int = setting_field(
        0,
        "KVCACHED_DIST_PHYSICAL_LIMIT_BYTES",
        Bytes(4096, "16G", zero_is_none=True),
        "Most physical memory of a rank; 0 for no limit beside the utilization.",
        "bytes",
    )
    state_dir: str = setting_field(
        "/dev/shm",
        "KVCACHED_DIST_STATE_DIR",
        AbsolutePath("/dev/shm"),
        "Directory of the snapshot files that `kvcached-dist status` reads; a local file system, best in memory.",
    )
    seed: int = setting_field(
        0,
        "KVCACHED_DIST_SEED",
        Integer(0, 0, (1 << 63) - 1),
        "Seed of every random choice, such as back-off.",
        world=True,
    )
    on_rank_lost: str = setting_field(
        "fail",
        "KVCACHED_DIST_ON_RANK_LOST",
        Choice(("fail", "rejoin")),
        "What survivors do: fail with the first cause, or wait for a restarted follower to rejoin.",
        world=True,
    )
    host_card_file: str = setting_field(
        "",
        "KVCACHED_DIST_HOST_CARD_FILE",
        AbsolutePath("/dev/shm/card0", may_be_empty=True),
        "Host devices that name the same small file share its capacity, like engines on one card; empty: each has its"
        " own.",
    )
    faults: str = setting_field(
        "",
        "KVCACHED_DIST_FAULTS",
        Text("rank=1,op=create,nth=3"),
        "Faults to inject while an engine serves, separated by semicolons; empty for none. For tests.",
        world=True,
    )
    fault_journal: str = setting_field(
        "",
        "KVCACHED_DIST_FAULT_JOURNAL",
        AbsolutePath("/tmp/faults.jsonl", may_be_empty=True),
        "File to which every injected fault is appended as it fires; empty for none. For tests and the replay.",
    )


__all__ = ["GIB", "MIB", "KnownSettings", "MachineSettings", "ProtocolSettings"]

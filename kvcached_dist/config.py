"""All settings of the library in one frozen value, read once when a coordinator starts.

The table of names, defaults and meanings in ``docs/settings.md`` is made from this file by
``python -m kvcached_dist.settings_doc``; a test holds both together.

Threads: a ``Config`` is immutable and may be shared. Blocks: never.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Final, Literal

from .coord.core.errors import ConfigError
from .setting_kinds import (
    LOG_LEVEL,
    AbsolutePath,
    Bytes,
    Choice,
    EngineName,
    Fraction,
    Integer,
    Seconds,
    Setting,
    Switch,
    Text,
    parse_bytes,
    refuse,
    setting_field,
    shown,
)

_log = logging.getLogger(__name__)

PresetName = Literal["engine", "replay", "tests"]
MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings in force. Every way of making one checks every value.

    Raises:
        ConfigError: a value is unusable, or two values contradict one another. One line that names the
            setting, the value given and a value that would work.
    """

    # Names that users of kvcached know.
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
        "Subtract pools that SGLang builds for itself beside elastic ones (draft pools, the split FP4 indexer of"
        " DeepSeek-V4, whatever else is not taken over) from what elastic pools may use, pool by pool with their exact"
        " bytes. Off: nothing is registered. Without effect where all pools stay native.",
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
        "Reclaim leaves this many free published pages. 0 with a minimum of 0 maps on demand.",
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
    log_level: str = setting_field("INFO", "KVCACHED_LOG_LEVEL", LOG_LEVEL, "Least severe message that is logged.")
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

    # Settings of kvcached_dist.
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
        "Longest run; runs get longer towards it under sustained demand.",
        "pages",
        world=True,
    )
    run_share: int = setting_field(
        8,
        "KVCACHED_DIST_RUN_SHARE",
        Integer(0, 8, 1 << 20),
        "Where growth goes on beyond the longest run, runs are one part in so many of what is held; 0: never longer.",
        world=True,
    )
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

    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    """(field, where its value comes from) for every field that is not at the library's default."""

    def __post_init__(self) -> None:
        for attribute, setting in SETTINGS.items():
            accepted = setting.kind.accept(setting.name, getattr(self, attribute))
            object.__setattr__(self, attribute, accepted)
        self._check_relations()

    def _check_relations(self) -> None:
        safe_lease_s = max(10 * self.beat_s, 4 * self.growth_deadline_s)
        # Each line: what must hold, the setting to change, the rule, a value that would work.
        self._relate(
            self.min_reserved_pages <= self.max_reserved_pages,
            "max_reserved_pages",
            "at least",
            "min_reserved_pages",
            2 * self.min_reserved_pages,
        )
        self._relate(
            self.run_pages_min <= self.run_pages_max,
            "run_pages_max",
            "at least",
            "run_pages_min",
            max(64, self.run_pages_min),
        )
        self._relate(self.lease_s > 2 * self.beat_s, "lease_s", "more than twice", "beat_s", f"{safe_lease_s:g}")
        self._relate(
            self.growth_deadline_s < self.lease_s, "growth_deadline_s", "less than", "lease_s", f"{self.lease_s / 4:g}"
        )
        self._relate(
            self.host_granule_bytes <= self.host_capacity_bytes,
            "host_capacity_bytes",
            "at least",
            "host_granule_bytes",
            max(2 * GIB, self.host_granule_bytes),
        )

    def _relate(self, holds: bool, field_name: str, relation: str, other: str, example: object) -> None:
        if not holds:
            rule = f"{relation} {SETTINGS[other].name}={getattr(self, other)}"
            raise refuse(SETTINGS[field_name].name, getattr(self, field_name), rule, example)

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, preset: PresetName = "engine", **overrides: object
    ) -> Config:
        """Reads the environment as it is now.

        An override wins over the environment, the environment over the preset.

        Args:
            environ: variables; the process environment when not given.
            preset: base values, see :meth:`preset`.
            **overrides: field values by field name, for example ``lease_s=5``.

        Raises:
            ConfigError: see the class.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, object] = dict(_preset_values(preset))
        sources = dict.fromkeys(values, f"preset {preset}")
        for attribute, setting in SETTINGS.items():
            if setting.name in environ and attribute not in overrides:
                # Parsed here, so that the error shows the text as it was written.
                values[attribute] = setting.kind.accept(setting.name, environ[setting.name])
                sources[attribute] = "environment"
        _add_overrides(values, sources, overrides)
        config = cls(**values, sources=tuple(sources.items()))  # type: ignore[arg-type]
        _warn_about(environ)
        return config

    @classmethod
    def preset(cls, name: PresetName, **overrides: object) -> Config:
        """Settings for one kind of use, without looking at the environment.

        Args:
            name: ``engine`` (long lease), ``replay`` or ``tests`` (short lease, small memory).
            **overrides: field values by field name.

        Raises:
            ConfigError: no such preset, or see the class.
        """
        values: dict[str, object] = dict(_preset_values(name))
        sources = dict.fromkeys(values, f"preset {name}")
        _add_overrides(values, sources, overrides)
        return cls(**values, sources=tuple(sources.items()))  # type: ignore[arg-type]

    def override(self, **overrides: object) -> Config:
        """A copy with other values for some fields, checked like any other."""
        sources = dict(self.sources)
        _add_overrides({}, sources, overrides)
        return dataclasses.replace(self, **overrides, sources=tuple(sources.items()))  # type: ignore[arg-type]

    def world_digest(self) -> str:
        """Hash of the settings that must be equal on all ranks; compared while a world starts."""
        return hashlib.sha256(json.dumps(self.world_values(), sort_keys=True).encode()).hexdigest()

    def world_values(self) -> dict[str, object]:
        """Setting name to value, for the settings that must be equal on all ranks."""
        return {setting.name: getattr(self, attr) for attr, setting in SETTINGS.items() if setting.world}

    def describe(self, *, changed_only: bool = False) -> str:
        """Which value is in force and where it came from, one setting a line.

        Args:
            changed_only: leave out what is at the library's default.
        """
        sources = dict(self.sources)
        lines = []
        for attribute, setting in SETTINGS.items():
            value = getattr(self, attribute)
            source = sources.get(attribute, "default" if value == DEFAULTS[attribute] else "argument")
            if source != "default" or not changed_only:
                lines.append(f"{setting.name}={shown(value)}{' ' + setting.unit if setting.unit else ''} ({source})")
        return "\n".join(lines)


SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType(
    {f.name: f.metadata["setting"] for f in dataclasses.fields(Config) if "setting" in f.metadata}
)
"""Field name to setting, in the order of the documentation."""

DEFAULTS: Final = MappingProxyType({f.name: f.default for f in dataclasses.fields(Config) if f.name in SETTINGS})

PRESETS: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "engine": MappingProxyType({}),
        "replay": MappingProxyType(
            {
                "beat_s": 0.25,
                "growth_deadline_s": 2.0,
                "lease_s": 5.0,
                "drain_deadline_s": 5.0,
                "start_timeout_s": 60.0,
                "max_cached_tokens": 200_000,
                "host_granule_bytes": 64 << 10,
            }
        ),
        "tests": MappingProxyType(
            {
                "beat_s": 0.05,
                "growth_deadline_s": 0.3,
                "lease_s": 1.0,
                "drain_deadline_s": 1.0,
                "start_timeout_s": 10.0,
                "ipc_timeout_s": 10.0,
                "host_granule_bytes": 4096,
                "host_capacity_bytes": 64 * MIB,
            }
        ),
    }
)
"""Preset name to the fields in which it differs from the defaults."""


def enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``ENABLE_KVCACHED`` is on; looks at nothing else, so that an engine without us reads no setting."""
    setting = SETTINGS["enabled"]
    value = (os.environ if environ is None else environ).get(setting.name, "")
    return bool(setting.kind.accept(setting.name, value))


def _preset_values(name: str) -> Mapping[str, object]:
    if name not in PRESETS:
        raise refuse("preset", name, "one of " + ", ".join(PRESETS), "engine")
    return PRESETS[name]


def _add_overrides(values: dict[str, object], sources: dict[str, str], overrides: Mapping[str, object]) -> None:
    for attribute, value in overrides.items():
        if attribute not in SETTINGS:
            near = difflib.get_close_matches(attribute, SETTINGS, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{attribute}={value!r}: no such setting; did you mean {near}?")
        values[attribute] = value
        sources[attribute] = "argument"


def _warn_about(environ: Mapping[str, str]) -> None:
    known = {setting.name for setting in SETTINGS.values()}
    for name in environ:
        if name == SETTINGS["contiguous_layout"].name:
            _warn_once(f"{name} has no effect: buffers always have the engine's own layout; unset it")
        elif name.startswith("KVCACHED_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/settings.md lists the settings"
            _warn_once(f"{name} is set, but it is no setting of kvcached_dist; {hint}")


@cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


__all__ = [
    "DEFAULTS",
    "PRESETS",
    "SETTINGS",
    "Config",
    "PresetName",
    "Setting",
    "enabled",
    "parse_bytes",
]

"""All settings of the library in one frozen value, read once when a coordinator starts.

``setting_table.py`` says which there are. The table of names, defaults and meanings in ``docs/settings.md`` is made
from it by ``python -m kvcached_dist.settings_doc``; a test holds both together.

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
from .setting_kinds import Setting, parse_bytes, refuse, shown
from .setting_table import GIB, MIB, MachineSettings

_log = logging.getLogger(__name__)

PresetName = Literal["engine", "replay", "tests"]


@dataclass(frozen=True, kw_only=True)
class Config(MachineSettings):
    """Settings in force. Every way of making one checks every value.

    Raises:
        ConfigError: a value is unusable, or two values contradict one another. One line that names the
            setting, the value given and a value that would work.
    """

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
        lines = []
        for attribute, setting in SETTINGS.items():
            value, source = getattr(self, attribute), self.origin(attribute)
            if source != "default" or not changed_only:
                lines.append(f"{setting.name}={shown(value)}{' ' + setting.unit if setting.unit else ''} ({source})")
        return "\n".join(lines)

    def origin(self, attribute: str) -> str:
        """Where the value of a field comes from: ``environment``, ``argument``, ``preset ...`` or ``default``."""
        default = "default" if getattr(self, attribute) == DEFAULTS[attribute] else "argument"
        return dict(self.sources).get(attribute, default)

    def announce(self, rank: int) -> None:
        """Say in the log of a starting rank what is in force, after the level of the library's logger was set.

        The level is touched only where ``KVCACHED_LOG_LEVEL`` was given: the logging of an application is its own,
        and a default must not change it.

        Args:
            rank: world rank that starts.
        """
        if self.origin("log_level") != "default":
            logging.getLogger(__package__).setLevel(self.log_level)
        changed = self.describe(changed_only=True).splitlines()
        _log.info("event=settings rank=%d %s", rank, "; ".join(changed) or "all at their defaults")


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

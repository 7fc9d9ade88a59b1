"""Names of known models, each a builder and a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...coord.core.errors import ConfigError
from ..sizing import ModelPlan

PAGE_BYTES_LEAST = 64 << 10
"""Blocks smaller than this are granted several at a time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One known model.

    Attributes:
        builder: makes a plan from the configuration and keyword options.
        config: dataclass with the model's dimensions.
        defaults: options that differ from the builder's defaults.
    """

    builder: Callable[..., ModelPlan]
    config: Any
    defaults: dict[str, Any]

    def options(self) -> list[str]:
        """Names of the keyword options."""
        parameters = inspect.signature(self.builder).parameters.values()
        return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


_ENTRIES: dict[str, Entry] = {}


def register(name: str, builder: Callable[..., ModelPlan], config: Any, **defaults: Any) -> None:
    """Add a model under a name.

    Args:
        name: name in the catalogue.
        builder: ``builder(name, config, **options) -> ModelPlan``; options are keyword-only.
        config: dataclass with the model's dimensions.
        defaults: options preset for this model.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _ENTRIES:
        raise ConfigError(f"model {name!r} is in the catalogue already; choose another name")
    _ENTRIES[name] = Entry(builder, config, defaults)


def names() -> tuple[str, ...]:
    """All names in the catalogue, sorted."""
    return tuple(sorted(_ENTRIES))


def options(name: str) -> tuple[str, ...]:
    """Options that a model takes, sorted.

    Raises:
        ConfigError: the name is unknown.
    """
    return tuple(sorted(_entry(name).options()))


def get(name: str, **chosen: Any) -> ModelPlan:
    """A model of the catalogue, before its sizes are known.

    Args:
        name: name in the catalogue.
        chosen: keyword options of its builder, for example ``page_size=64, tp_size=2``.

    Raises:
        ConfigError: the name or an option is unknown, or a value does not work.
    """
    entry = _entry(name)
    unknown = sorted(set(chosen) - set(entry.options()))
    if unknown:
        raise ConfigError(f"model {name!r} has no option {unknown[0]!r}; it takes {', '.join(options(name))}")
    return entry.builder(name, entry.config, **{**entry.defaults, **chosen})


def _entry(name: str) -> Entry:
    if name not in _ENTRIES:
        raise ConfigError(f"model {name!r} is not in the catalogue; known are {', '.join(names())}")
    return _ENTRIES[name]


def require_positive(model: str, **values: float) -> None:
    """Refuse options that must be greater than zero.

    Raises:
        ConfigError: names the model, the option and the minimum.
    """
    for option, value in values.items():
        if value <= 0:
            minimum = "at least 1" if isinstance(value, int) else "greater than 0"
            raise ConfigError(f"model {model!r}: {option}={value} must be {minimum}")


def require_choice(model: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse an option that is none of the choices.

    Raises:
        ConfigError: names the model, the option and the choices.
    """
    if value not in choices:
        raise ConfigError(f"model {model!r}: {option}={value!r} must be one of {', '.join(map(repr, choices))}")


def blocks_per_page(block_tokens: int, widest_block_bytes: int) -> int:
    """B: one for token pages; for single tokens, rows and slots the least power of two that makes 64 KiB.

    Args:
        block_tokens: tokens of a block, 0 for rows and slots.
        widest_block_bytes: bytes of a block in the widest pool of the domain.
    """
    if block_tokens > 1:
        return 1
    per_page = 1
    while per_page * widest_block_bytes < PAGE_BYTES_LEAST:
        per_page *= 2
    return per_page


def shard_heads(model: str, what: str, heads: int, tp_size: int) -> int:
    """Heads per rank: divided over the ranks, at least one each (then replicated).

    Raises:
        ConfigError: the heads do not divide evenly.

    Source: SGLang 0.5.20, ``ModelConfig.get_num_kv_heads``.
    """
    if heads >= tp_size and heads % tp_size:
        raise ConfigError(f"model {model!r}: {heads} {what} do not divide over tp_size={tp_size}")
    return max(1, heads // tp_size)

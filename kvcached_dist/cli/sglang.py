"""``kvcached-dist sglang``: whether the SGLang that is installed here can have elastic pools, place by place."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..config import Config
from ..coord.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """One place of the engine.

    Attributes:
        name: dotted path of a hooked function, or place and name that hooks use.
        kind: of the hook, or ``uses``.
        present: this version has it.
        in_force: the function leads to our hook once the engine's registry has applied it; ``None`` for a name.
    """

    name: str
    kind: str
    present: bool
    in_force: bool | None


def sglang(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Show which places of the SGLang in this environment are hooked, and whether the hooks are in force."""
    engine, places = _version(), check()
    fits = all(place.present and place.in_force is not False for place in places)
    if as_json:
        typer.echo(json.dumps({"version": engine, "fits": fits, "places": [asdict(place) for place in places]}))
    else:
        _show(engine, places, fits)
    if not fits:
        raise typer.Exit(1)


def check() -> list[Place]:
    """Register all hooks in this process, as a scheduler does, and look.

    Raises:
        ConfigError: SGLang is not here or cannot be imported.
    """
    try:
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        plugin_module = importlib.import_module("kvcached_dist.sglang.plugin")
        features = importlib.import_module("kvcached_dist.sglang.features")
        plugin = plugin_module.Plugin(Config.from_env())
        missing = set(plugin.missing())
    except ImportError as error:
        raise ConfigError(f"SGLang cannot be imported in this environment ({sys.executable}): {error}") from error
    here = [hook for hook in plugin.hooks if hook.target not in missing]
    for hook in here:
        registry.HookRegistry.register(hook.target, hook.call, getattr(registry.HookType, hook.kind))
    registry.HookRegistry.apply_hooks()
    idle = set(plugin.not_in_force())
    places = [
        Place(hook.target, hook.kind.lower(), hook.target not in missing, hook in here and hook.target not in idle)
        for hook in plugin.hooks
    ]
    return places + [Place(str(use), "uses", str(use) not in missing, None) for use in features.USES]


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown version"


def _show(engine: str, places: list[Place], fits: bool) -> None:
    table = Table(title=f"SGLang {engine}", title_justify="left")
    for column in ("place", "hook", "present", "in force"):
        table.add_column(column, overflow="fold")
    for place in places:
        table.add_row(place.name.removeprefix("sglang.srt."), place.kind, _word(place.present), _word(place.in_force))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print("Pools can be elastic." if fits else "Pools stay native: this version lacks what says 'no' above.")


def _word(value: Any) -> str:
    return {True: "yes", False: "no", None: ""}[value]


__all__ = ["check", "sglang"]

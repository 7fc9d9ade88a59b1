"""``kvcached-dist status``: what every rank of every engine on this host holds."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import Config
from ..coord.core.errors import ConfigError
from ..setting_kinds import refuse
from ..snapshot import EngineView, Life, RankView, SweepReport, list_engines, sweep
from ..snapshot_schema import pool_totals

_COUNTERS = {
    "grow_foreground": "grow fg",
    "grow_background": "bg",
    "grow_aborted": "aborted",
    "refused": "refused",
    "misses": "misses",
    "reclaimed_runs": "shrunk",
}
_WORLD_MAX = 4096
_PIPE_COLUMNS = 160
"""Width where no terminal tells one: lines that `grep` finds whole."""


def status(
    as_json: Annotated[bool, typer.Option("--json", help="All that is known, as one JSON object.")] = False,
    state_dir: Annotated[
        str | None, typer.Option("--state-dir", help="Directory of the snapshots [default: KVCACHED_DIST_STATE_DIR].")
    ] = None,
    sweep_dead: Annotated[bool, typer.Option("--sweep", help="Remove what dead engines have left.")] = False,
) -> None:
    """Show the memory, health and counters of every rank of all engines on this host."""
    # The environment is checked as a whole even when the directory is given: a bad value is worth a line here.
    directory = Config.from_env().state_dir
    if state_dir is not None:
        directory = os.path.abspath(state_dir)
        if not os.path.isdir(directory):
            raise refuse("--state-dir", state_dir, "an existing directory", "/dev/shm")
    engines = list_engines(directory)
    report = _sweep(directory) if sweep_dead else SweepReport((), ())
    if as_json:
        typer.echo(json.dumps(to_json(directory, engines, report), indent=2))
    else:
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_COLUMNS
        show(Console(width=width), directory, engines, report)


def _sweep(state_dir: str) -> SweepReport:
    try:
        return sweep(state_dir)
    except OSError as error:
        raise ConfigError(f"--state-dir={state_dir}: cannot be swept ({error.strerror})") from error


def to_json(state_dir: str, engines: list[EngineView], report: SweepReport) -> dict[str, Any]:
    """The machine-readable form; ``state`` of a rank is its snapshot as published."""
    return {
        "state_dir": state_dir,
        "engines": [
            {
                "name": engine.name,
                "life": engine.life,
                "live_ranks": engine.live_ranks,
                "totals": engine_totals(engine),
                "ranks": [_rank_json(view) for view in engine.ranks],
            }
            for engine in engines
        ],
        "swept": [str(path) for path in report.removed],
        "not_swept": [{"path": str(path), "reason": reason} for path, reason in report.kept],
    }


def _rank_json(view: RankView) -> dict[str, Any]:
    owner = None
    if view.owner is not None:
        owner = {**asdict(view.owner), "boot": str(view.owner.boot)}
    return {
        "rank": view.rank,
        "life": view.life.value,
        "path": str(view.path),
        "owner": owner,
        "problem": view.problem,
        "totals": pool_totals(view.state or {}),
        "state": view.state,
    }


def engine_totals(engine: EngineView) -> dict[str, int]:
    """Bytes of all live ranks together; a dead rank holds nothing any more."""
    totals = pool_totals({})
    for view in engine.ranks:
        if view.life is Life.LIVE:
            for key, value in pool_totals(view.state or {}).items():
                totals[key] += value
    return totals


def show(console: Console, state_dir: str, engines: list[EngineView], report: SweepReport) -> None:
    """Prints tables: per engine one line per rank, its domains and its pools."""
    if not engines:
        console.print(f"No engine runs here: no snapshot in {escape(state_dir)}.", highlight=False)
    for engine in engines:
        _show_engine(console, engine)
    for path in report.removed:
        console.print(f"swept {escape(str(path))}", highlight=False, soft_wrap=True)
    for path, reason in report.kept:
        console.print(f"left {escape(str(path))}: {escape(reason)}", highlight=False, soft_wrap=True)
    if any(view.life is Life.DEAD for engine in engines for view in engine.ranks) and not (
        report.removed or report.kept
    ):
        console.print("Dead ranks hold no memory; --sweep removes what they left.", highlight=False)


def _show_engine(console: Console, engine: EngineView) -> None:
    first = next((view.state for view in engine.ranks if view.state), {})
    tp, pp = first.get("tp"), first.get("pp")
    console.print(
        f"[bold]{escape(engine.name)}[/bold]  {_life(engine.life)}  TP={_text(tp)} PP={_text(pp)}"
        f"  {engine.live_ranks} of {_world_size(tp, pp)} ranks live",
        highlight=False,
    )
    for table in (_memory_table(engine), _activity_table(engine), _domain_table(engine), _pool_table(engine)):
        if table.row_count:
            console.print(table)
    for note in _notes(engine, tp, pp):
        console.print(note, highlight=False, soft_wrap=True)


def _world_size(tp: object, pp: object) -> int | str:
    return tp * pp if isinstance(tp, int) and isinstance(pp, int) and 0 < tp * pp <= _WORLD_MAX else "?"


def _notes(engine: EngineView, tp: object, pp: object) -> Iterator[str]:
    for view in engine.ranks:
        note = view.problem or (view.state or {}).get("failure")
        if note:
            yield f"rank {view.rank}: {escape(str(note))}"
        native = (view.state or {}).get("native_because")
        if native:
            yield f"rank {view.rank}: nothing is elastic: {escape(str(native))}"
        kept = _mapping((view.state or {}).get("runtime_pools"))
        if kept:
            listed = ", ".join(f"{escape(str(name))} {size(held)}" for name, held in sorted(kept.items()))
            what = "native pools" if native else "stays with the engine, subtracted from the budget"
            yield f"rank {view.rank}: {what}: {listed}"
    world_size = _world_size(tp, pp)
    if isinstance(world_size, int):
        missing = sorted(set(range(world_size)) - {view.rank for view in engine.ranks})
        if missing:
            yield f"no snapshot of rank {', '.join(map(str, missing))}: not started yet, or closed"


def _memory_table(engine: EngineView) -> Table:
    columns = ("mapped", "reserved", "retained", "limit", "static", "virtual")
    table = _table("memory", "rank", "life", *columns, "card free")
    for view in engine.ranks:
        totals = pool_totals(view.state or {})
        free = _mapping((view.state or {}).get("device")).get("free")
        table.add_row(str(view.rank), _life(view.life.value), *_sizes(totals, columns), size(free))
    return table


def _activity_table(engine: EngineView) -> Table:
    table = _table("activity", "rank", "pid", "age", "epoch", "step", *_COUNTERS.values())
    for view in engine.ranks:
        state = view.state or {}
        counters = _mapping(state.get("counters"))
        table.add_row(
            str(view.rank),
            str(view.owner.pid) if view.owner else "?",
            _age(state),
            _text(state.get("epoch")),
            _text(state.get("step")),
            *(_text(counters.get(key)) for key in _COUNTERS),
        )
    return table


def _domain_table(engine: EngineView) -> Table:
    table = _table("domains", "rank", "domain", "health", "blocks", "published", "free", "growable",
                   "pages", "first cause")  # fmt: skip
    for view in engine.ranks:
        for name, domain in _mapping((view.state or {}).get("domains")).items():
            row = _mapping(domain)
            published, per_page = row.get("published"), row.get("blocks_per_page")
            pages = published // per_page if isinstance(published, int) and isinstance(per_page, int) else None
            table.add_row(
                str(view.rank), escape(str(name)), _text(row.get("health")),
                *(_text(row.get(key)) for key in ("blocks", "published", "free", "growable")),
                _text(pages), _text(row.get("first_cause") or ""),
            )  # fmt: skip
    return table


def _pool_table(engine: EngineView) -> Table:
    columns = ("mapped", "reserved", "retained", "limit", "static", "virtual")
    table = _table("pools", "rank", "pool", "domain", *columns)
    for view in engine.ranks:
        for name, pool in _mapping((view.state or {}).get("pools")).items():
            row = _mapping(pool)
            table.add_row(str(view.rank), escape(str(name)), _text(row.get("domain")), *_sizes(row, columns))
    return table


def _sizes(row: Mapping[str, Any], columns: tuple[str, ...]) -> list[str]:
    values = {column: row.get(f"{column}_bytes") for column in columns}
    return ["none" if column == "limit" and not value else size(value) for column, value in values.items()]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    words = ("life", "domain", "health", "first cause", "pool")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", overflow="fold")
    return table


def size(value: object) -> str:
    """Bytes for people, in powers of 1024."""
    if not isinstance(value, (int, float)):
        return "?"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _age(state: Mapping[str, Any]) -> str:
    updated = state.get("updated")
    return f"{max(0.0, time.time() - updated):.1f} s" if isinstance(updated, (int, float)) else "?"


def _life(life: str) -> str:
    colour = {Life.LIVE.value: "green", Life.UNKNOWN.value: "yellow"}.get(life, "red")
    return f"[{colour}]{life}[/{colour}]"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return "?" if value is None else escape(str(value))


__all__ = ["engine_totals", "show", "size", "status", "to_json"]

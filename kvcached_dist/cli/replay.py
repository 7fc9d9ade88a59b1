"""``kvcached-dist replay``: the main job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import ConfigError, Interrupted, KVDistError
from ..replay import launcher, plot, torchrun
from ..replay.options import ReplayOptions
from ..replay.rank_main import leave
from ..replay.report import EXIT_FAILED, EXIT_INPUT, EXIT_OK, Report
from ..setting_kinds import parse_bytes

_CAPACITY_LEAST = 4096

_LOG_WIDTH = 120
"""Columns of the tables where no terminal says how wide it is."""


def replay(
    trace: Annotated[
        str,
        typer.Option(metavar="FILE|synthetic", help="Mooncake .jsonl or Azure .csv file, or the built-in generator."),
    ] = "synthetic",
    model: Annotated[str, typer.Option(metavar="NAME", help="Model of the catalogue.")] = "deepseek-v4-flash",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks per stage.")] = 2,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 2,
    backend: Annotated[str, typer.Option(metavar="host|cuda", help="Where the pools live.")] = "host",
    capacity: Annotated[
        str, typer.Option(metavar="BYTES", help="Physical memory per rank, for example 2GiB.")
    ] = "2GiB",
    requests: Annotated[int | None, typer.Option(help="Take only the first requests of the trace.")] = None,
    speed: Annotated[
        float | None, typer.Option(help="Virtual seconds per second of wall clock; default: as fast as possible.")
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help="Fault to inject, for example rank=1,op=create,nth=37.")
    ] = None,
    cached_tokens: Annotated[
        int | None, typer.Option(help="Bound of the prefix cache in tokens; default 200000.")
    ] = None,
    launcher_name: Annotated[
        str, typer.Option("--launcher", metavar="spawn|torchrun", help="Who starts the ranks.")
    ] = "spawn",
    granule: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Mapping granule of the host backend, 4 KiB and up.")
    ] = None,
    lease: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="A rank that is silent for this long is lost; default 5.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the generated trace and of every random choice.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for standard output.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw physical against static memory over time.")
    ] = None,
) -> None:
    """Replay a serving trace on TP x PP processes with elastic, verified pools.

    Exit status: 0 done, 2 bad input, 3 the group failed, 4 corrupt blocks or ranks that disagree.
    """
    try:
        options = ReplayOptions(
            trace=trace, model=model, tp=tp, pp=pp, backend=backend,
            capacity_bytes=parse_bytes("--capacity", capacity, _CAPACITY_LEAST, "2GiB"),
            requests=requests, speed=speed, faults=tuple(fault or ()), cached_tokens=cached_tokens,
            launcher=launcher_name,
            granule_bytes=parse_bytes("--granule", granule, _CAPACITY_LEAST, "64K") if granule is not None else None,
            lease_s=lease, seed=seed,
        )  # fmt: skip
        options.validate()
        _check_outputs(json_file, plot_file)
        status = _run(options, json_file, plot_file)
        if options.launcher == "torchrun":
            leave(status)
    except Interrupted as stopped:
        _complain(str(stopped))
        status = 128 + stopped.signum
    except ConfigError as error:
        _complain(str(error))
        status = EXIT_INPUT
    except KVDistError as error:
        _complain(str(error))
        status = EXIT_FAILED
    raise typer.Exit(status)


def _check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    if json_file is not None and str(json_file) != "-" and not json_file.parent.is_dir():
        folder = json_file.parent
        raise ConfigError(f"--json {json_file}: the folder {folder} does not exist; create it or choose another")
    if plot_file is not None:
        plot.check(str(plot_file))


def _run(options: ReplayOptions, json_file: Path | None, plot_file: Path | None) -> int:
    # With the JSON on standard output, everything for people goes to standard error.
    to_stderr = str(json_file) == "-"
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console = Console(stderr=to_stderr, width=_LOG_WIDTH)
    with _progress(console) as on_news:
        if options.launcher == "torchrun":
            status, report = torchrun.run_under_torchrun(options, on_news)
        else:
            report = launcher.run_spawned(options, on_news)
            status = report.exit_status
    if report is None:
        return status
    _show(report, console, status)
    if json_file is not None:
        _write_json(report, json_file)
    if plot_file is not None and report.outcomes:
        title = f"{options.model}, {Path(options.trace).name}, tp {options.tp} x pp {options.pp}"
        plot.draw(str(plot_file), report.outcomes, options.tp, title)
    return status


def _show(report: Report, console: Console, status: int) -> None:
    if any(outcome.steps for outcome in report.outcomes):
        report.print(console)
    if status == EXIT_OK:
        console.print(report.verdict(), style="green", highlight=False)
    else:
        _complain(report.verdict())


def _write_json(report: Report, json_file: Path) -> None:
    text = json.dumps(report.to_json(), indent=2)
    if str(json_file) == "-":
        sys.stdout.write(text + "\n")
        return
    try:
        json_file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {json_file}: cannot be written ({error.strerror}); choose another file") from error


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[launcher.News], None] | None]:
    """A progress bar on a terminal; nothing elsewhere."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[running]} running, {task.fields[held]} on rank 0, virtual {task.fields[virtual]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("replay", total=None, running=0, held="-", virtual="-")

        def on_news(news: launcher.News) -> None:
            bar.update(
                task, completed=news.completed, total=news.requests, running=news.running,
                held=f"{news.physical_bytes >> 20} MiB", virtual=f"{news.virtual_s:.0f} s",
            )  # fmt: skip

        yield on_news


def _complain(text: str) -> None:
    sys.stderr.write(f"kvcached-dist replay: {' '.join(text.split())}\n")


__all__ = ["replay"]

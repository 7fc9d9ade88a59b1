"""``kvcached-dist chaos``: faults on real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

from ..chaos.cluster import RigError
from ..chaos.options import ChaosOptions
from ..chaos.report import EXIT_INPUT, EXIT_OK, EXIT_RIG, Outcome, Report
from ..chaos.run import plan_of, run_chaos
from ..errors import ConfigError, Interrupted
from ..setting_kinds import parse_bytes

_GRANULE_LEAST = 4096
_WIDTH = 140
"""Columns where no terminal says how wide it is."""


def chaos(
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks per stage.")] = 2,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 2,
    faults: Annotated[int, typer.Option(help="How many faults.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the plan and of the workload.")] = 1,
    address: Annotated[
        str, typer.Option(metavar="ray://HOST:PORT", help="Ray cluster to use; default: a local one for this run.")
    ] = "",
    granule: Annotated[
        str, typer.Option(metavar="BYTES", help="Mapping granule of the host backend, 4 KiB to 2 MiB.")
    ] = "64K",
    lease: Annotated[float, typer.Option(metavar="SECONDS", help="A rank that is silent for this long is lost.")] = 5.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for standard output.")
    ] = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Print the faults of the plan and leave.")] = False,
) -> None:
    """Kill, stop, refuse and silence ranks by a plan, and check that nobody disagrees, leaks or waits for ever.

    Exit status: 0 no violation, 1 violations, 2 bad input, 3 the test rig failed (says nothing about the product).
    """
    try:
        options = ChaosOptions(
            tp=tp, pp=pp, faults=faults, seed=seed, address=address,
            granule_bytes=parse_bytes("--granule", granule, _GRANULE_LEAST, "64K"), lease_s=lease,
        )  # fmt: skip
        options.validate()
        _check_output(json_file)
        status = _show_plan(options) if plan_only else _run(options, json_file)
    except Interrupted as stopped:
        _complain(str(stopped))
        status = 128 + stopped.signum
    except ConfigError as error:
        _complain(str(error))
        status = EXIT_INPUT
    except RigError as error:
        _complain(f"rig error, not a failure of the product: {error}")
        status = EXIT_RIG
    raise typer.Exit(status)


def _check_output(json_file: Path | None) -> None:
    if json_file is not None and str(json_file) != "-" and not json_file.parent.is_dir():
        raise ConfigError(
            f"--json {json_file}: the folder {json_file.parent} does not exist; create it or choose another"
        )


def _show_plan(options: ChaosOptions) -> int:
    for fault in plan_of(options):
        sys.stdout.write(f"{fault}\n")
    return EXIT_OK


def _run(options: ChaosOptions, json_file: Path | None) -> int:
    # With the JSON on standard output, everything for people goes to standard error. The file is kept here, because
    # standard output is Ray's while the run lasts.
    output = sys.stdout
    console = _console(sys.stderr if str(json_file) == "-" else output)
    console.print(
        f"chaos: tp {options.tp} x pp {options.pp}, {options.faults} faults, seed {options.seed}, lease"
        f" {options.lease_s:g} s, granule {options.granule_bytes} bytes",
        highlight=False,
    )

    def on_outcome(outcome: Outcome) -> None:
        style = "red" if outcome.violations or not outcome.fired else None
        console.print(f"{outcome.line()}", style=style, highlight=False, markup=False, soft_wrap=True)

    report = run_chaos(options, on_outcome)
    report.print(console)
    _tell(report, console)
    if json_file is not None:
        _write_json(report, json_file, output)
    return report.exit_status


def _tell(report: Report, console: Console) -> None:
    if report.exit_status == EXIT_OK:
        console.print(report.verdict(), style="green", highlight=False)
        return
    for text in report.all_violations():
        console.print(f"violation: {text}", style="red", highlight=False, markup=False, soft_wrap=True)
    _complain(report.verdict())


def _console(file: TextIO) -> Console:
    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=_WIDTH)


def _write_json(report: Report, json_file: Path, output: TextIO) -> None:
    text = json.dumps(report.to_json(), indent=2)
    if str(json_file) == "-":
        output.write(text + "\n")
        return
    try:
        json_file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {json_file}: cannot be written ({error.strerror}); choose another file") from error


def _complain(text: str) -> None:
    sys.stderr.write(f"kvcached-dist chaos: {' '.join(text.split())}\n")


__all__ = ["chaos"]

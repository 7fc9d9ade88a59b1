"""kvcached's own tensor-parallel benchmark, run as it is beside ours: one process and one card per rank."""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import bounded, peer
from .samples import summary

SCRIPT = Path("benchmarks") / "bench_tp_ipc" / "kvcached_tp_ipc_benchmark.py"
INTERFACE = Path("integration") / "vllm" / "interfaces.py"
ITERATIONS = 20
SECONDS = 40.0

_ITERATION = re.compile(r"^\[iter +\d+\] map=([\d.]+)s +unmap=([\d.]+)s", re.MULTILINE)
_SUMMARY = re.compile(r"^\|\s*(mean|p95|max|min)\s*\|\s*([\d.]+)\s*\|\s*([\d.]+)\s*\|", re.MULTILINE)
_START = re.compile(r"\binit_kvcached\([^()]*\)")


def find(given: str) -> Path | None:
    """The benchmark's script: the one given, or the one of the checkout that kvcached is imported from."""
    folder = peer.package()
    paths = [Path(given)] if given else [folder.parent / SCRIPT] if folder else []
    return next((path.resolve() for path in paths if path.is_file()), None)


def measure(layers: tuple[int, ...], ranks: tuple[int, ...], cards: int, given: str = "") -> dict[str, Any]:
    """Map and unmap over tensor-parallel ranks, both layouts.

    Args:
        layers: layer counts.
        ranks: rank counts of this run; those with a card per rank are measured, for that is what the script starts.
        cards: cards of this run.
        given: path of the script; empty: look beside kvcached.

    Returns:
        ``rows`` with figures in microseconds or a reason each, or ``skipped`` with the reason for having none.
    """
    sizes = [count for count in ranks if 2 <= count <= cards]
    script = find(given)
    reason = peer.missing()
    if not reason and script is None:
        reason = f"its script {given or SCRIPT.name} is not there; name it with --peer-tp PATH"
    if not reason and not sizes:
        reason = f"it takes one card per rank, two at least; asked for are {max(ranks)} ranks on {cards} cards"
    if reason or script is None:
        return {"skipped": reason}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        runnable, note = adapted(script, Path(folder))
        for count in layers:
            for size in sizes:
                for name in peer.LAYOUTS:
                    rows += _layout(runnable, name, count, size)
    return {"script": str(script), "adapted": note, "rows": rows}


def _layout(script: Path, layout: str, layers: int, size: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    late = False
    for pages in peer.PAGES:
        row = peer.row_of(layout, layers, size, pages)
        if late:
            row["skipped"] = "not run: the run before it was not done in time"
        else:
            options = ["--tp-size", str(size), "--num-layers", str(layers), "--pages-per-iter", str(pages)]
            options += ["--iters", str(ITERATIONS), "--map-impl", "async", "--verbose"]
            options += [] if peer.LAYOUTS[layout] else ["--not-contiguous"]
            row["options"] = " ".join(options)
            ended = _run(script, options, peer.LAYOUTS[layout])
            late = ended.timed_out
            row |= parsed(ended)
        rows.append(row)
    return rows


def _run(script: Path, options: list[str], contiguous: bool) -> bounded.Ended:
    try:
        return bounded.run([sys.executable, str(script), *options], SECONDS, peer.settings(contiguous))
    finally:
        peer.clean_up()


def parsed(ended: bounded.Ended) -> dict[str, Any]:
    """Figures from what the script printed: its iterations, and its summary (milliseconds) as it stands there.

    A run that failed has no figures, whatever it printed before.
    """
    text = ended.text
    if ended.failure:
        return {"skipped": ended.failure, "seconds": ended.seconds}
    iterations = [(float(a) * 1e6, float(b) * 1e6) for a, b in _ITERATION.findall(text)]
    printed = {name: {"map_ms": float(grow), "unmap_ms": float(back)} for name, grow, back in _SUMMARY.findall(text)}
    if not iterations or "mean" not in printed:
        end = " ".join(text.split())[-bounded.TAIL :]
        return {"skipped": f"its output has no figures: {end}", "seconds": ended.seconds}
    return {
        "map": summary([grow for grow, _ in iterations]),
        "unmap": summary([back for _, back in iterations]),
        "printed": printed,
        "seconds": ended.seconds,
    }


def adapted(script: Path, folder: Path) -> tuple[Path, str]:
    """A script that fits the kvcached that is installed, and what was changed for it (empty: nothing).

    The benchmark of some versions names the number of ranks ``tp_size`` where the package's ``init_kvcached`` calls
    it ``world_size``; its workers then end before they serve anything. Such a script is copied into ``folder`` with
    that one name changed.

    Args:
        script: the benchmark.
        folder: an empty folder, kept as long as the script is run.
    """
    text = script.read_text(encoding="utf-8")
    known = _parameters()
    fitting = _START.sub(lambda call: re.sub(r"\btp_size=", "world_size=", call[0]), text)
    if fitting == text or "tp_size" in known or "world_size" not in known:
        return script, ""
    copy = folder / script.name
    copy.write_text(fitting, encoding="utf-8")
    for entry in script.parent.iterdir():  # it loads its ways of sending from its own folder
        if entry.name != script.name:
            os.symlink(entry, folder / entry.name)
    return copy, "init_kvcached(tp_size=...) became world_size=..., the name that the installed version knows"


def _parameters() -> set[str]:
    """Parameters of the installed ``init_kvcached``, read from its source; empty when it cannot be read."""
    package = peer.package()
    try:
        tree = ast.parse(((package or Path()) / INTERFACE).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "init_kvcached":
            return {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    return set()

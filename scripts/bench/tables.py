"""The tables that a run prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def _ms(micros: float) -> str:
    return f"{micros / 1000:.2f}"


def _judged(text: str, met: bool) -> str:
    return f"[green]{text}[/]" if met else f"[red]{text} x[/]"


def growth(console: Console, cells: list[dict[str, Any]], layers: int, ranks: int) -> None:
    """One table per model and rank count."""
    chosen = [cell for cell in cells if (cell["layers"], cell["ranks"]) == (layers, ranks)]
    if not chosen:
        return
    bare = any("bare" in cell for cell in chosen)
    table = Table(title=f"{layers} layers, {ranks} rank{'s' if ranks > 1 else ''}", title_justify="left")
    columns = ["run\npages", "useful\nMiB", "new\nextents"]
    columns += ["bare driver\nms p50"] if bare else []
    columns += ["floor\nms p50", "p99", "ours\nms p50", "p99", "allowed\nms"]
    columns += ["reclaim floor\nms p50", "ours\nms p50", "allowed\nms"]
    columns += ["sustained\nruns x pages", "floor\nGB/s", "ours\nGB/s", "share"]
    for column in columns:
        table.add_column(column, justify="right")
    for cell in chosen:
        table.add_row(*_row(cell, bare))
    console.print(table)


def _row(cell: dict[str, Any], bare: bool) -> list[str]:
    head = [str(cell["run_pages"]), f"{cell['useful_bytes'] / 2**20:.0f}"]
    if "skipped" in cell:
        return [*head, cell["skipped"]]
    floor, ours, targets = cell["floor"], cell.get("ours"), cell.get("targets")
    row = [*head, str(cell["extents"])]
    if bare:
        row.append(_ms(cell["bare"]["grow"]["p50_us"]))
    row += [_ms(floor["grow"]["p50_us"]), _ms(floor["grow"]["p99_us"])]
    if ours is None or targets is None:
        return [*row, "-", "-", "-", _ms(floor["reclaim"]["p50_us"]), "-", "-", "-", f"{floor['gb_per_s']:.1f}"]
    row += [_judged(_ms(ours["grow"]["p50_us"]), targets["grow_met"]), _ms(ours["grow"]["p99_us"])]
    row += [_ms(targets["grow_limit_us"]), _ms(floor["reclaim"]["p50_us"])]
    row += [_judged(_ms(ours["reclaim"]["p50_us"]), targets["reclaim_met"]), _ms(targets["reclaim_limit_us"])]
    row += [f"{cell['sustained_runs']} x {cell['run_pages']}", f"{floor['gb_per_s']:.1f}", f"{ours['gb_per_s']:.1f}"]
    return [*row, _judged(f"{targets['sustained_ratio']:.2f}", targets["sustained_met"])]


def blocks(console: Console, rows: list[dict[str, Any]]) -> None:
    """Alloc and free without growth."""
    table = Table(title="alloc and free without growth, ns per operation (p50 of rounds; best)", title_justify="left")
    for column in ("blocks", "alloc ours", "sliced tensor", "native pool", "free ours", "sliced tensor", "native pool"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [str(row["blocks"])]
        for kind in ("alloc", "free"):
            for who in ("ours", "sliced", "pool"):
                figures = row[who][kind]
                cells.append(f"{figures['p50_ns']:.0f}; {figures['best_ns']:.0f}")
        table.add_row(*cells)
    console.print(table)


def peer(console: Console, found: dict[str, Any]) -> None:
    """kvcached's own figures, or why there are none."""
    if "rows" not in found:
        console.print(f"kvcached beside it: {found['skipped']}")
        return
    table = Table(title="kvcached, per-layer pools, K and V, 2 MiB pages, one process", title_justify="left")
    for column in ("layers", "pages", "map ms p50", "unmap ms p50"):
        table.add_column(column, justify="right")
    for row in found["rows"]:
        middle = len(row["map_us"]) // 2
        figures = (_ms(sorted(row[kind])[middle]) for kind in ("map_us", "unmap_us"))
        table.add_row(str(row["layers"]), str(row["pages"]), *figures)
    console.print(table)


def occupancy(console: Console, rows: list[dict[str, Any]]) -> None:
    """Share of the physical memory that comes back at 50 % random occupancy; 0.5 would be all of it."""
    together = sorted({row["blocks_together"] for row in rows})
    table = Table(title="reclaimed share of physical memory, half of the blocks free at random", title_justify="left")
    table.add_column("run\npages", justify="right")
    for count in together:
        table.add_column(f"requests of\n{count} block{'s' if count > 1 else ''}", justify="right")
    for run in sorted({row["run_pages"] for row in rows}):
        shares = {row["blocks_together"]: row["recovered_share"] for row in rows if row["run_pages"] == run}
        table.add_row(str(run), *(f"{shares[count]:.2f}" for count in together))
    console.print(table)

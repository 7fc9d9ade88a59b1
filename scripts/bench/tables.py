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


def blocks(console: Console, rows: list[dict[str, Any]], beside: dict[str, dict[str, Any]]) -> None:
    """Alloc and free without growth: ours, what torch alone would cost, and other block managers."""
    who = {"ours": "ours", "native pool": "pool", "sliced tensor": "sliced"}
    found = {name: {row["blocks"]: row[key] for row in rows} for name, key in who.items()}
    found |= {name: {row["blocks"]: row for row in other["rows"]} for name, other in beside.items() if "rows" in other}
    counts = [row["blocks"] for row in rows]
    table = Table(title="alloc and free without growth, ns per operation, p50 of rounds; best", title_justify="left")
    table.add_column("")
    for kind in ("alloc", "free"):
        for count in counts:
            table.add_column(f"{kind}\n{count} block{'s' if count > 1 else ''}", justify="right")
    for name, figures in found.items():
        cells = [figures[count][kind] for kind in ("alloc", "free") for count in counts]
        table.add_row(name, *(f"{cell['p50_ns']:.0f}; {cell['best_ns']:.0f}" for cell in cells))
    console.print(table)
    for name, other in beside.items():
        if "skipped" in other:
            console.print(f"{name}: not measured, {other['skipped']}", markup=False)


def peer(console: Console, title: str, found: dict[str, Any]) -> None:
    """kvcached's map and unmap beside our growth and reclaim of the same bytes, or why there is nothing."""
    if "skipped" in found:
        console.print(f"{title}: not measured, {found['skipped']}", markup=False)
        return
    table = Table(title=f"{title}, K and V, pages of 2 MiB; ours for the same bytes", title_justify="left")
    for column in (
        "layout", "layers", "ranks", "pages", "useful\nMiB", "map\nms p50", "p99", "GB/s", "ours, run\npages",
        "grow\nms p50", "p99", "GB/s", "times\nas fast", "unmap\nms p50", "ours\nms p50", "times\nas fast",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in found["rows"]:
        head = [row["layout"], str(row["layers"]), str(row["ranks"]), str(row["pages"])]
        table.add_row(*head, f"{row['useful_bytes'] / 2**20:.0f}", *_peer_figures(row))
    console.print(table)
    for row in found["rows"]:
        if "skipped" in row or "after" in row:
            said = row.get("skipped") or f"measured, but it {row['after']}"
            where = f"{row['layout']}, {row['layers']} layers, {row['pages']} pages"
            console.print(f"{where}: {said}", markup=False)


def _peer_figures(row: dict[str, Any]) -> list[str]:
    ours = row.get("ours")
    theirs = [] if "skipped" in row else [row["map"], row["unmap"]]
    cells = ["no figures", "-", "-"]
    if theirs:
        grow = theirs[0]
        cells = [_ms(grow["p50_us"]), _ms(grow["p99_us"]), f"{_rate(row['useful_bytes'], grow):.1f}"]
    if ours is None:
        return [*cells, "-", "-", "-", "-", "-", _ms(theirs[1]["p50_us"]) if theirs else "-", "-", "-"]
    grow = ours["grow"]
    cells += [str(ours["run_pages"]), _ms(grow["p50_us"]), _ms(grow["p99_us"])]
    cells.append(f"{_rate(ours['useful_bytes'], grow):.1f}")
    cells.append(_times(theirs[0], grow) if theirs else "-")
    cells += [_ms(theirs[1]["p50_us"]) if theirs else "-", _ms(ours["reclaim"]["p50_us"])]
    return [*cells, _times(theirs[1], ours["reclaim"]) if theirs else "-"]


def _rate(useful_bytes: int, series: dict[str, Any]) -> float:
    return float(useful_bytes / series["p50_us"] / 1000)


def _times(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    return f"{theirs['p50_us'] / ours['p50_us']:.1f}"


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

"""The tables that a run prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from .parts import LOCK_STEP
from .seams import GROWTH, SUSTAINED


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


def profile(console: Console, cell: dict[str, Any]) -> None:
    """Where the time of a cell's growths went, ours and the floor's; nothing for a cell without ``--profile``."""
    found = cell.get("profile")
    if found is None:
        return
    ranks, floor = cell["ranks"], found["floor"]
    where = f"{cell['layers']} layers, {ranks} rank{'s' if ranks > 1 else ''}, run of {cell['run_pages']} pages"
    table = Table(title=f"{where}: microseconds per growth, p50 / mean; rank 0", title_justify="left")
    columns = {
        "ours\nalone": found.get(GROWTH, {}),
        "ours\nin a row": found.get(SUSTAINED, {}),
        "floor\nalone": floor[GROWTH],
        "floor\nin a row": floor[SUSTAINED],
        "floor in a row,\nin lock step": floor[LOCK_STEP],
    }
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for group in ("parts", "whole", "driver", "flights"):
        by_column = [one.get(group, {}) for one in columns.values()]
        if group == "whole":
            table.add_row("the whole growth", *map(_p50_and_mean, by_column))
        else:
            for name in dict.fromkeys(name for figures in by_column for name in figures):
                if ranks == 1 and not any(figures[name]["mean_us"] for figures in by_column if name in figures):
                    continue  # frames and followers, which a world of one does not have
                table.add_row(name, *(_p50_and_mean(figures.get(name, {})) for figures in by_column))
        table.add_section()
    console.print(table)
    for section in (GROWTH, SUSTAINED):
        ours = found.get(section, {"missing": {}})
        for reason, count in ours["missing"].items():
            text = f"{section}: {count} of {ours['growths']} growths are left out: {reason}"
            console.print(text, style="red", markup=False)


def _p50_and_mean(figure: dict[str, float]) -> str:
    return f"{figure['p50_us']:.0f} / {figure['mean_us']:.0f}" if figure else "-"


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
    measured = [row for row in rows if "skipped" not in row]
    together = sorted({row["blocks_together"] for row in measured if not row["of_run"]})
    title = "share reclaimed, half of the requests ended at random: of what we hold; as the device says"
    table = Table(title=title, title_justify="left")
    for column in ("run\npages", "pages", "full\nMiB"):
        table.add_column(column, justify="right")
    for count in together:
        table.add_column(f"requests of\n{count} block{'s' if count > 1 else ''}", justify="right")
    table.add_column("of a\nrun's size", justify="right")
    for run in sorted({row["run_pages"] for row in measured}):
        found = {0 if row["of_run"] else row["blocks_together"]: row for row in measured if row["run_pages"] == run}
        first = found[0]
        shares = (
            f"{found[count]['recovered_share']:.2f}; {found[count]['device_share']:.2f}" for count in (*together, 0)
        )
        table.add_row(str(run), str(first["pages"]), f"{first['full_bytes'] / 2**20:.0f}", *shares)
    console.print(table)
    for row in rows:
        if "skipped" in row:
            console.print(f"run of {row['run_pages']} pages: not measured, {row['skipped']}", markup=False)

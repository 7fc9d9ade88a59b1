"""kvcached on the same card, where it is installed. Nothing of it is needed here, and nothing of it can end the run."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from . import bounded
from .plan import pages_of

PAGE_BYTES = 2 << 20
PAGES = (1, 8)
NAME = f"kvb{os.getpid()}"
"""What kvcached's processes call themselves; short, for it becomes part of the path of a socket."""

LAYOUTS = {"per layer": False, "contiguous": True}
"""Name -> whether one mapping holds all layers (kvcached's ``KVCACHED_CONTIGUOUS_LAYOUT``)."""
SECONDS = 40.0


def package() -> Path | None:
    """Folder of the importable kvcached, without importing it."""
    spec = importlib.util.find_spec("kvcached")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(folders[0]) if folders else None


def missing() -> str:
    """Why kvcached is not measured; empty: it can be."""
    folder = package()
    if folder is None:
        return "kvcached is not importable"
    if not list(folder.glob("vmm_ops*")):
        return f"kvcached in {folder} has no built extension vmm_ops"
    return ""


def useful_bytes(layers: int, pages: int) -> int:
    """Bytes that a call maps on one rank: K and V of every layer, the same in both layouts."""
    return 2 * layers * pages * PAGE_BYTES


def offsets_of(pages: int, layers: int, contiguous: bool) -> list[int]:
    """Byte offsets of the first pages, as its page allocator computes them; a contiguous page spans all layers."""
    stride = 2 * layers * PAGE_BYTES if contiguous else PAGE_BYTES
    return [index * stride for index in range(pages)]


def settings(contiguous: bool, **more: str) -> dict[str, str]:
    """Environment of a process that imports kvcached."""
    folder = package()
    found = bounded.environment(
        KVCACHED_CONTIGUOUS_LAYOUT="true" if contiguous else "false",
        KVCACHED_IPC_NAME=NAME,
        KVCACHED_LOG_LEVEL="WARNING",
        **more,
    )
    if folder is not None:
        found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(folder.parent)])
    return found


def clean_up() -> None:
    """Remove what processes that were killed have left: sockets of workers, and the limit that they share."""
    for folder in glob.glob(f"/tmp/kvcached-tp-{NAME}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    Path("/dev/shm", NAME).unlink(missing_ok=True)


def measure(layers: tuple[int, ...], repeats: int, device: str = "cuda:0") -> dict[str, Any]:
    """Map and unmap of both layouts in one process on one card.

    Args:
        layers: layer counts.
        repeats: timed calls of each kind.
        device: where; ``cpu`` exercises kvcached's calls without a card.

    Returns:
        ``rows`` with figures in microseconds or a reason each, or ``skipped`` with the reason for having none.
    """
    reason = missing()
    if reason:
        return {"skipped": reason}
    rows: list[dict[str, Any]] = []
    for count in layers:
        for name, contiguous in LAYOUTS.items():
            arguments = ["growth", "--device", device, "--layers", str(count), "--repeats", str(repeats)]
            arguments += ["--pages", ",".join(map(str, PAGES)), *(["--contiguous"] if contiguous else [])]
            found = bounded.figures("peer_child", arguments, SECONDS, settings(contiguous))
            after = {"after": found["after"]} if "after" in found else {}
            for pages, figures in zip(PAGES, found.get("rows", [found] * len(PAGES)), strict=True):
                rows.append(row_of(name, count, 1, pages) | figures | after)
    return {"rows": rows}


def row_of(layout: str, layers: int, ranks: int, pages: int) -> dict[str, Any]:
    """What a measurement is of; figures or a reason are added."""
    size = useful_bytes(layers, pages)
    return {"layout": layout, "layers": layers, "ranks": ranks, "pages": pages, "useful_bytes": size}


def beside_ours(found: dict[str, Any], cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Add to every row our growth and reclaim of the run whose bytes come closest, where it was measured.

    Args:
        found: what :func:`measure` or the tensor-parallel benchmark returned; changed in place.
        cells: our figures.

    Returns:
        ``found``.
    """
    ours = {(cell["layers"], cell["ranks"], cell["run_pages"]): cell for cell in cells if "ours" in cell}
    for row in found.get("rows", []):
        run = pages_of(row["layers"], row["useful_bytes"])
        cell = ours.get((row["layers"], row["ranks"], run))
        if cell is not None:
            kept = {
                name: {k: v for k, v in cell["ours"][name].items() if k != "raw_us"} for name in ("grow", "reclaim")
            }
            row["ours"] = {"run_pages": run, "useful_bytes": cell["useful_bytes"], **kept}
    return found


def blocks(device: str = "cuda:0") -> dict[str, Any]:
    """Alloc and free of kvcached's block manager without growth, per-layer layout, or why not."""
    reason = missing()
    if reason:
        return {"skipped": reason}
    environment = settings(
        False,
        KVCACHED_PAGE_PREALLOC_ENABLED="false",
        KVCACHED_MIN_RESERVED_PAGES="0",
        KVCACHED_MAX_RESERVED_PAGES="100000",
        KVCACHED_GPU_UTILIZATION="1.0",
    )
    try:
        return bounded.figures("peer_child", ["blocks", "--device", device], SECONDS, environment)
    finally:
        clean_up()

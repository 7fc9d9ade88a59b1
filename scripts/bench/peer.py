"""kvcached's own map and unmap on the same card, where it is installed. Nothing of it is needed here."""

from __future__ import annotations

import importlib
import time
from typing import Any

from .floor import now_us

PAGE_BYTES = 2 << 20


def measure(layers: tuple[int, ...], pages: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Microseconds of one map and one unmap call, per-layer pools with K and V; or why not."""
    try:
        ops = importlib.import_module("kvcached.vmm_ops")
    except ImportError as error:
        return {"skipped": f"kvcached is not importable ({error})"}
    import torch

    torch.cuda.init()
    rows: list[dict[str, Any]] = []
    for count in layers:
        ops.init_kvcached("cuda:0", PAGE_BYTES, False)
        size = PAGE_BYTES * (max(pages) + 1)
        ops.create_kv_tensors(size=size, dtype_size=2, dev_str="cuda:0", num_layers=count, num_kv_buffers=2)
        for wanted in pages:
            offsets = [index * PAGE_BYTES for index in range(wanted)]
            grow, back = [], []
            for _ in range(repeats):
                began = now_us()
                ops.map_to_kv_tensors(offsets)
                mapped = now_us()
                ops.unmap_from_kv_tensors(offsets)
                grow.append(mapped - began)
                back.append(now_us() - mapped)
                time.sleep(0.001)
            rows.append({"layers": count, "pages": wanted, "map_us": grow, "unmap_us": back})
        ops.shutdown_kvcached()
    return {"rows": rows}

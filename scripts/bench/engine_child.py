"""In a process of its own: SGLang's native allocators of token slots and of pages, where SGLang is importable.

On a card their ids are tensors of the card and the calls only queue work there; what is timed is what the scheduler
thread spends, not what the card does. ``python -m bench.engine_child --device cpu``, started by :mod:`bench.blocks`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch

from .bounded import report
from .rounds import BLOCKS, COUNTS, HELD, alloc_and_free, nothing

PAGE_TOKENS = 16
STANDINS = Path(__file__).resolve().parents[2] / "tests" / "sglang" / "standins"
"""Empty modules for what SGLang imports and a machine without a card lacks; last on the path, so real ones win."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    sys.path.append(str(STANDINS))
    try:
        from sglang.srt.mem_cache import allocator
    except ImportError as error:
        report({"skipped": f"SGLang's allocators cannot be imported: {error}"})
        return
    found: dict[str, Any] = {}
    token = allocator.TokenToKVPoolAllocator(BLOCKS, torch.int64, device, None, False)
    found["TokenToKVPoolAllocator"] = rows(token, 1, device)
    paged = allocator.PagedTokenToKVPoolAllocator(BLOCKS * PAGE_TOKENS, PAGE_TOKENS, torch.int64, device, None, False)
    found[f"PagedTokenToKVPoolAllocator, page {PAGE_TOKENS}"] = rows(paged, PAGE_TOKENS, device)
    report({"allocators": found})


def rows(allocator: Any, tokens: int, device: str) -> list[dict[str, Any]]:
    """Figures of every count of blocks; a block is a page of ``tokens`` tokens."""

    def settle() -> None:
        torch.cuda.synchronize(device)

    def alloc(count: int) -> Any:
        return allocator.alloc(count * tokens)

    kept = alloc(HELD)
    gc.disable()
    waits = settle if device.startswith("cuda") else nothing
    found = [{"blocks": count, **alloc_and_free(alloc, allocator.free, count, waits)} for count in COUNTS]
    gc.enable()
    allocator.free(kept)
    return found


if __name__ == "__main__":
    main()

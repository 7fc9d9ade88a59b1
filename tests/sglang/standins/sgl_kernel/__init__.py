"""Stands for the engine's CUDA kernels. One of them is called on the CPU, so it has a body."""

from __future__ import annotations

import torch
from absent import stand_in  # type: ignore[import-not-found]

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    locations: torch.Tensor,
    *_: object,
) -> None:
    """Write consecutive pieces of ``locations`` into ``table[row, start:end]``."""
    lengths = (ends - starts).tolist()
    pieces = torch.split(locations[: sum(lengths)], lengths)
    for row, start, piece in zip(rows.tolist(), starts.tolist(), pieces, strict=True):
        table[row, start : start + len(piece)] = piece.to(table.dtype)

"""The engine's table from request rows to ids: no stale row may name an id that is gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..coord.core.types import Run

SLICE_ENTRIES = 4 << 20
"""Entries of the table that are looked at in one operation."""


class RequestTable:
    """Which rows of the table can name ids, and the clearing of names that are gone.

    Threads: the scheduler thread. Blocks: never.
    """

    def __init__(self) -> None:
        self._used = range(0)

    def handed_out(self, rows: Sequence[int]) -> None:
        """Only rows that were handed out can name ids.

        Args:
            rows: at least one.
        """
        first, end = min(rows), max(rows) + 1
        used = self._used
        self._used = range(min(first, used.start), max(end, used.stop)) if used else range(first, end)

    def forget(self, req_to_token: torch.Tensor, runs: Sequence[Run], pages: int, page_tokens: int) -> None:
        """Name the null block instead of ids that are gone: kernels read rows past what a request has written.

        Args:
            req_to_token: the engine's table, rows by positions, of token ids.
            runs: runs that are gone, of the domain that the table is about.
            pages: pages of that domain.
            page_tokens: tokens of one of them.
        """
        used = self._used
        if not runs or not used:
            return
        # The table has rows for thousands of requests; the engine hands out few of them, next to one another.
        table = req_to_token[used.start : used.stop]
        # Made on the device: a copy from here could wait for its stream.
        gone = torch.zeros(pages, dtype=torch.bool, device=table.device)
        for run in runs:
            gone[run.first : run.end].fill_(True)
        # In slices: the table can be large, and every operation on it makes a copy of its size.
        for rows in torch.split(table, max(1, SLICE_ENTRIES // table.shape[1])):
            rows.masked_fill_(gone[(rows // page_tokens).long()], 0)


__all__ = ["RequestTable"]

"""Compressor states that are addressed by request rows: a row begins with the state of an empty request.

Nothing else in the engine sees to that on CUDA and on the CPU. All layers lie at one stride in one reservation, so a
reset is two fills whatever the number of layers: it stands in every prefill step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..pools.backing import StageBacking

_POOL = "c128_state"


class RequestStates:
    """C128 states of DeepSeek-V4 on one rank.

    Args:
        backing: pools of this stage.

    Threads: the scheduler thread.
    """

    def __init__(self, backing: StageBacking) -> None:
        self._parts: list[tuple[torch.Tensor, float]] = []
        """What of each row is filled, with what: elements ``[layers, rows, states, width]``."""
        pool = next((pool for pool in backing.stage.pools if pool.name == _POOL and pool.buffers), None)
        if pool is None:
            return
        rows = backing.tensor(_POOL).view(getattr(torch, pool.dtype))
        states = rows.view(*rows.shape[:2], -1, *pool.row_shape)
        # A ring of sums and scores, or one running state: its maximum, sum and values.
        first, rest = (0.0, float("-inf")) if pool.ring_rows else (float("-inf"), 0.0)
        width = states.shape[3] // (2 if pool.ring_rows else 3)
        self._parts = [(states[..., :width], first), (states[..., width:], rest)]

    def reset(self, rows: Sequence[int], forward: Any = None) -> None:
        """These rows are those of empty requests.

        Args:
            rows: request rows that were just handed out, so they are backed.
            forward: CUDA stream of the engine's batches; ``None`` on the host. The batch that is running may still
                write the state of a row's last request, so the reset comes behind it, and behind the reset whatever
                comes next.

        Blocks: never; nothing is read from memory of the host that a copy would have to wait for.
        """
        if not self._parts:
            return
        index = torch.tensor(rows)
        if forward is None:
            self._fill(index)
            return
        current = torch.cuda.current_stream()
        forward.wait_stream(current)
        with torch.cuda.stream(forward):
            self._fill(index.pin_memory().to(self._parts[0][0].device, non_blocking=True))
        current.wait_stream(forward)

    def _fill(self, index: torch.Tensor) -> None:
        for part, value in self._parts:
            part.index_fill_(1, index, value)


__all__ = ["RequestStates"]

"""A fence behind the work that was launched on the caller's current CUDA stream."""

from __future__ import annotations

import torch


class CudaFence:
    """An event on the current stream; passed when the device has executed everything before it.

    Source: CUDA events complete in stream order, ``cuEventQuery`` neither blocks nor synchronises; unmapping
    itself orders nothing (``cuMemUnmap`` does not synchronise).

    Threads: make it in the thread that launches the work; ask from any thread.
    """

    def __init__(self) -> None:
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def done(self) -> bool:
        """Whether the work has finished. Does not block."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

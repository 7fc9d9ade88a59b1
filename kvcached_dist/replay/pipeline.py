"""The pipeline between stages: activations forwards, results backwards, over a gloo group.

Stage m+1 starts step s only when the activations of step s + ``LAG_STEPS`` are there, as on hardware that keeps
micro-batches in flight; so later stages really are behind, by a known number of steps. The last stage sends the
result of every step to all earlier stages, which process it ``depth`` steps later. Every message carries the
checksum of the batch, so a stage that scheduled anything else is found in that step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ..coord.links.pair import first_line
from ..errors import Divergence, KVDistError

LAG_STEPS = 2
"""Steps that each stage is at least behind the one before it."""

_WORDS = 8
_STEP, _CHECKSUM, _LAST = range(3)
_ACTIVATION_TAG = 11
_RESULT_TAG = 12
_SENDS_KEPT = 64
"""Sends that may be unconfirmed; a torch Work that is dropped before it is waited for loses its message."""


def depth_of(pp_size: int) -> int:
    """Steps between a batch and the processing of its result, for a pipeline of ``pp_size`` stages."""
    return 1 + LAG_STEPS * (pp_size - 1)


class PipelineBroken(KVDistError):
    """A message between stages failed. Ask the coordinator for the first cause."""


class Pipeline:
    """The stage's ends of the pipeline. Used by the scheduler thread only.

    Args:
        rank: world rank, ``pp_rank * tp + tp_rank``.
        tp: tensor-parallel size.
        pp: pipeline stages.
        store: where the ranks find each other; None for a world of one rank.
        timeout_s: longest wait for one message.

    Raises:
        PipelineBroken: the group could not be made.

    Blocks: until all ranks have joined, at most ``timeout_s``.
    """

    def __init__(self, rank: int, tp: int, pp: int, store: Store | None, timeout_s: float) -> None:
        self.stage, self.column = divmod(rank, tp)
        self.depth = depth_of(pp)
        self._tp, self._pp = tp, pp
        self._timeout = timedelta(seconds=timeout_s)
        self._activations: deque[list[int]] = deque()
        self._received_until = -1
        self._ended_at: int | None = None
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._own_results: dict[int, int] = {}
        self._tp_group: dist.ProcessGroup | None = None
        if tp * pp > 1:
            self._guarded("joining the pipeline", lambda: self._join(rank, store))

    def _join(self, rank: int, store: Store | None) -> None:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self._tp * self._pp, timeout=self._timeout)
        # Every rank makes every group, in the same order.
        for stage in range(self._pp):
            members = list(range(stage * self._tp, (stage + 1) * self._tp))
            group = dist.new_group(members, timeout=self._timeout, backend="gloo")
            if rank in members and self._tp > 1:
                self._tp_group = group

    def before_step(self, step: int) -> None:
        """Wait until the stage before is far enough ahead.

        Blocks: at most the timeout per message.

        Raises:
            PipelineBroken: the stage before is gone.
        """
        if self.stage == 0:
            return
        source = (self.stage - 1) * self._tp + self.column
        while self._ended_at is None and self._received_until < step + LAG_STEPS:
            message = self._receive(source, _ACTIVATION_TAG, f"activations of step {self._received_until + 1}")
            self._received_until = message[_STEP]
            if message[_LAST]:
                self._ended_at = message[_STEP]
            self._activations.append(message)

    def result(self, step: int, checksum: int) -> None:
        """Take the result of a step from the last stage.

        Args:
            step: the step whose result is due.
            checksum: of the batch that this rank ran in that step.

        Blocks: until the last stage has run it, at most the timeout.

        Raises:
            PipelineBroken: the last stage is gone.
            Divergence: it ran another batch.
        """
        if self._pp == 1:
            return
        if self.stage == self._pp - 1:
            found_step, found = step, self._own_results.pop(step)
        else:
            source = (self._pp - 1) * self._tp + self.column
            message = self._receive(source, _RESULT_TAG, f"the result of step {step}")
            found_step, found = message[_STEP], message[_CHECKSUM]
        self._compare("result", step, checksum, found_step, found)

    def after_step(self, step: int, checksum: int, *, last: bool) -> None:
        """Hand the batch on, after this stage has run it, and agree with the TP peers on it.

        Args:
            step: the step.
            checksum: of its batch.
            last: no step follows.

        Blocks: for the TP peers of this stage, at most the timeout.

        Raises:
            PipelineBroken: a peer is gone.
            Divergence: the stage before, or a TP peer, ran another batch.
        """
        if self.stage > 0:
            message = self._activations.popleft()
            self._compare("activation", step, checksum, message[_STEP], message[_CHECKSUM])
        if self._tp_group is not None:
            self._agree_in_stage(step, checksum)
        if self._pp == 1:
            return
        if self.stage < self._pp - 1:
            self._send((self.stage + 1) * self._tp + self.column, _ACTIVATION_TAG, step, checksum, last)
        else:
            self._own_results[step] = checksum
            for stage in range(self._pp - 1):
                self._send(stage * self._tp + self.column, _RESULT_TAG, step, checksum, last)

    def drain(self, checksums: dict[int, int]) -> None:
        """Take the results that are still under way after the last step, in order of steps.

        Args:
            checksums: step to checksum of the batches whose result was not taken yet.
        """
        for step in sorted(checksums):
            self.result(step, checksums[step])
        self._guarded("the last messages", lambda: self._confirm(keep=0))

    def close(self) -> None:
        """Leave the group, in good order only: after a failure the process ends instead."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _agree_in_stage(self, step: int, checksum: int) -> None:
        both = torch.tensor([checksum, -checksum], dtype=torch.int64)
        self._guarded(
            f"the agreement of stage {self.stage} on step {step}",
            lambda: dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._tp_group),
        )
        if both.tolist() != [checksum, -checksum]:
            raise Divergence(f"step {step}: the TP ranks of stage {self.stage} scheduled different batches")

    def _compare(self, what: str, step: int, checksum: int, found_step: int, found: int) -> None:
        if (step, checksum) != (found_step, found):
            raise Divergence(
                f"{what} of step {step}: this rank ran batch {checksum:#x}, the peer stage sent step {found_step} "
                f"with batch {found:#x}"
            )

    def _send(self, target: int, tag: int, step: int, checksum: int, last: bool) -> None:
        message = torch.zeros(_WORDS, dtype=torch.int64)
        message[_STEP], message[_CHECKSUM], message[_LAST] = step, checksum, int(last)

        def post() -> None:
            work = dist.isend(message, target, tag=tag)
            if work is not None:
                self._sends.append((work, message))
            self._confirm(keep=_SENDS_KEPT)

        self._guarded(f"sending step {step} to rank {target}", post)

    def _confirm(self, keep: int) -> None:
        while len(self._sends) > keep:
            work, _ = self._sends.popleft()
            work.wait()

    def _receive(self, source: int, tag: int, what: str) -> list[int]:
        buffer = torch.zeros(_WORDS, dtype=torch.int64)
        self._guarded(f"{what} from rank {source}", lambda: dist.recv(buffer, source, tag=tag))
        message: list[int] = buffer.tolist()
        return message

    def _guarded(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise PipelineBroken(f"pipeline: {what}: {first_line(error)}") from error


__all__ = ["LAG_STEPS", "Pipeline", "PipelineBroken", "depth_of"]

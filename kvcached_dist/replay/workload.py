"""Requests and virtual time."""

from __future__ import annotations

from dataclasses import dataclass

HASH_BLOCK_TOKENS = 512
"""Tokens that one ``hash_id`` of the Mooncake format stands for."""

STEP_US = 5_000
"""Virtual length of a step without prefill work, in microseconds."""

PREFILL_TOKEN_US = 20
"""Virtual cost of one prefill token, in microseconds."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        index: position in the replayed trace, from 0; the identity of the request.
        arrival_us: virtual arrival time, relative to the first request, in microseconds.
        prompt_tokens: tokens to prefill, at least 1.
        output_tokens: tokens to generate, at least 1.
        hash_ids: one id per 512 prompt tokens (the last may stand for fewer); equal leading ids are a
            shared prefix. Empty when the trace does not know.
    """

    index: int
    arrival_us: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.arrival_us < 0 or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"a request needs arrival >= 0 and at least one prompt and one output token, got {self}")

    @property
    def full_hash_blocks(self) -> int:
        """Number of hash blocks that the prompt fills completely: only these are worth caching."""
        return min(len(self.hash_ids), self.prompt_tokens // HASH_BLOCK_TOKENS)


def step_duration_us(prefill_tokens: int) -> int:
    """Virtual length of a step that prefills ``prefill_tokens`` tokens."""
    return STEP_US + PREFILL_TOKEN_US * prefill_tokens


class VirtualClock:
    """Time of the replay. A pure function of the batches, hence equal on all ranks."""

    def __init__(self) -> None:
        self.now_us = 0

    def advance(self, prefill_tokens: int) -> int:
        """Let one step pass.

        Returns:
            The length of the step in microseconds.
        """
        duration = step_duration_us(prefill_tokens)
        self.now_us += duration
        return duration

    def jump(self, to_us: int) -> int:
        """Skip idle time up to ``to_us``; never backwards.

        Returns:
            How much was skipped, in microseconds.
        """
        skipped = max(0, to_us - self.now_us)
        self.now_us += skipped
        return skipped


__all__ = ["HASH_BLOCK_TOKENS", "PREFILL_TOKEN_US", "STEP_US", "Request", "VirtualClock", "step_duration_us"]

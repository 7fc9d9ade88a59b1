"""Requests over time, and what the client saw of them."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp  # type: ignore[import-not-found]

from tests.sglang.models import VOCABULARY


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        at_s: when it is sent, in seconds from the start of the load.
        prompt: token ids.
        tokens: tokens to generate.
    """

    at_s: float
    prompt: tuple[int, ...]
    tokens: int


@dataclass
class Answer:
    """What the client saw of one request; seconds from the start of the load.

    Attributes:
        sent: when it was sent.
        chunks: when each piece of the stream came.
        tokens: tokens asked for.
        error: why there is no full answer.
    """

    sent: float
    tokens: int
    chunks: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.chunks[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.chunks[-1] - self.chunks[0]) / max(1, self.tokens - 1)


def random_requests(number: int, prompt: tuple[int, int], tokens: tuple[int, int], seed: int) -> list[Request]:
    """Requests that all arrive at once, for a closed loop.

    Args:
        number: how many.
        prompt: least and most tokens of a prompt.
        tokens: least and most tokens to generate.
        seed: of the lengths and prompts.
    """
    choose = random.Random(seed)
    return [
        Request(0.0, random_prompt(choose, choose.randint(*prompt)), choose.randint(*tokens)) for _ in range(number)
    ]


def random_prompt(choose: random.Random, length: int) -> tuple[int, ...]:
    """Token ids without the special ones."""
    return tuple(choose.randrange(3, VOCABULARY) for _ in range(length))


def play(
    port: int, requests: Sequence[Request], parallel: int | None = None, begin: float | None = None
) -> list[Answer]:
    """Send requests at their times and wait for all answers.

    Args:
        port: of the server.
        requests: what is sent.
        parallel: at most so many at a time.
        begin: when the load starts, by ``time.perf_counter``, which all processes of a machine share; default now.
    """
    return asyncio.run(play_all([(port, requests)], parallel, begin))[0]


async def play_all(
    loads: Sequence[tuple[int, Sequence[Request]]], parallel: int | None = None, begin: float | None = None
) -> list[list[Answer]]:
    """Loads on several servers at the same time."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        begin = time.perf_counter() if begin is None else begin
        gates = [asyncio.Semaphore(parallel or len(requests)) for _, requests in loads]
        return await asyncio.gather(
            *(
                asyncio.gather(*(_one(session, begin, port, request, gate) for request in requests))
                for (port, requests), gate in zip(loads, gates, strict=True)
            )
        )


async def _one(
    session: aiohttp.ClientSession, begin: float, port: int, request: Request, gate: asyncio.Semaphore
) -> Answer:
    await asyncio.sleep(max(0.0, begin + request.at_s - time.perf_counter()))
    parameters = {"max_new_tokens": request.tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(request.prompt), "sampling_params": parameters, "stream": True}
    async with gate:
        answer = Answer(time.perf_counter() - begin, request.tokens)
        try:
            async with session.post(f"http://127.0.0.1:{port}/generate", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        answer.chunks.append(time.perf_counter() - begin)
                        last = line
            finished = json.loads(last[6:]) if answer.chunks else {}
            produced = finished.get("meta_info", {}).get("completion_tokens", 0)
            if produced != request.tokens:
                answer.error = f"{produced} of {request.tokens} tokens: {str(finished)[:200]}"
        except (aiohttp.ClientError, TimeoutError) as error:
            answer.error = repr(error)
    return answer


def summary(answers: Sequence[Answer]) -> dict[str, float]:
    """Throughput and tails; milliseconds unless the name says otherwise."""
    good = [answer for answer in answers if not answer.error]
    if not good:
        return {"served": 0, "failed": len(answers)}
    seconds = max(answer.chunks[-1] for answer in good) - min(answer.sent for answer in good)
    first = [1000 * answer.ttft for answer in good]
    each = [1000 * answer.tpot for answer in good]
    gaps = [1000 * (later - earlier) for answer in good for earlier, later in pairwise(answer.chunks)]
    return {
        "served": len(good),
        "failed": len(answers) - len(good),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "tokens_per_s": sum(answer.tokens for answer in good) / seconds,
        "ttft_p50_ms": statistics.median(first),
        "ttft_p99_ms": quantile(first, 0.99),
        "tpot_p50_ms": statistics.median(each),
        "tpot_p99_ms": quantile(each, 0.99),
        "gap_p99_ms": quantile(gaps or [0.0], 0.99),
        "gap_max_ms": max(gaps, default=0.0),
    }


def summary_between(answers: Sequence[Answer], begin: float, end: float) -> dict[str, float]:
    """Like :func:`summary`, of the requests that were sent and done between these seconds of the load.

    ``tokens_per_s`` counts what other requests produced in that time, too: a piece of a stream is one token, or as many
    on average as the whole answer has per piece.
    """
    inside = [answer for answer in answers if answer.error or (begin <= answer.sent and answer.chunks[-1] <= end)]
    found = summary(inside)
    good = [answer for answer in answers if not answer.error]
    produced = sum(
        answer.tokens * sum(begin <= at <= end for at in answer.chunks) / len(answer.chunks) for answer in good
    )
    if good and end > begin:
        seconds = end - begin
        found |= {"seconds": seconds, "requests_per_s": found["served"] / seconds, "tokens_per_s": produced / seconds}
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]

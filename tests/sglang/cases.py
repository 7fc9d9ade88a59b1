"""Requests whose tokens are compared with those of the engine's own pools."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Generate = Callable[[Sequence[int], int], list[int]]

_RANDOM = random.Random(4)
PROMPT = [_RANDOM.randrange(3, 500) for _ in range(900)]

LLAMA_COLD = (PROMPT[:600], 12)
DSV4_COLD = (PROMPT[:400], 8)
"""The first prompt and how many tokens are asked for."""

LLAMA_PARALLEL = (PROMPT[:100], PROMPT[:300], PROMPT[50:350], PROMPT[:520], PROMPT[200:880], PROMPT[3:444])


def llama(generate: Generate, flush: Callable[[], None]) -> Mapping[str, list[int]]:
    """Cold, prefix hit, flushed, chunked and concurrent requests.

    Args:
        generate: prompt and number of tokens to greedy tokens.
        flush: empties the prefix cache.
    """
    tokens: dict[str, Any] = {"cold": generate(*LLAMA_COLD), "prefix_hit": generate(*LLAMA_COLD)}
    flush()
    tokens["flushed"] = generate(*LLAMA_COLD)
    tokens["chunked"] = generate(PROMPT[100:900], 24)
    return tokens | _at_once(generate, LLAMA_PARALLEL, 40)


def dsv4(generate: Generate, flush: Callable[[], None]) -> Mapping[str, list[int]]:
    """The same, shorter: the toy computes token by token. Long enough for a second page and a C128 entry in it."""
    tokens: dict[str, Any] = {"cold": generate(*DSV4_COLD), "prefix_hit": generate(*DSV4_COLD)}
    flush()
    tokens["flushed"] = generate(*DSV4_COLD)
    return tokens | _at_once(generate, (PROMPT[:100], PROMPT[:300], PROMPT[50:350], PROMPT[3:44]), 8)


def _at_once(generate: Generate, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: generate(prompt, tokens), prompts))
    return {f"concurrent_{number}": answer for number, answer in enumerate(answers)}

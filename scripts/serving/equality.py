"""Whether a native and an elastic server say the same: greedy tokens and the log probability of each."""

from __future__ import annotations

import json
import math
import random
import urllib.error
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import load
from .server import Server

PROMPTS = (40, 600, 3000, 600)
"""Tokens of the prompts that are asked one after another; the last one hits the prefix cache."""

TOKENS = 24
"""Generated for each prompt."""

AT_ONCE = 8
AT_ONCE_PROMPT = 900
"""Prompts of the batch that is asked at once, and tokens of each; none begins as another one does."""

DIGITS = 6
"""Of the log probabilities that are kept."""

Answer = dict[str, list[Any]]
"""``tokens``, and ``logprobs`` as long; ``None`` for one that is no number."""


def tokens(server: Server) -> dict[str, Any]:
    """Answers to prompts one after another (cold, longer, chunked, prefix hit, flushed), and to a batch at once.

    The batch is asked twice of a native server: which requests share a step differs from time to time there as well.

    Returns:
        ``in_turn``: answers by name; ``at_once``: per batch, its answers, empty where one failed; ``errors_at_once``.
    """
    prompt = load.random_prompt(random.Random(11), max(PROMPTS))
    server.flush()
    in_turn = {f"{number}: {length} tokens": _ask(server, prompt[:length]) for number, length in enumerate(PROMPTS)}
    server.flush()
    in_turn["flushed"] = _ask(server, prompt[: PROMPTS[1]])
    errors: list[str] = []
    batches = [_at_once(server, prompt, errors) for _ in range(1 if server.elastic else 2)]
    server.flush()
    return {"in_turn": in_turn, "at_once": batches, "errors_at_once": errors}


def compare(native: dict[str, Any], elastic: dict[str, Any]) -> dict[str, Any]:
    """Where tokens differ, how far log probabilities do, and how much the tokens can say.

    Args:
        native: from :func:`tokens`.
        elastic: likewise.

    Returns:
        ``requests`` one after another; names of those that are ``different`` (an answer that is not whole is);
        ``largest_logprob_difference`` of these requests; ``distinct`` token ids per request; ``at_once`` with the
        differences between two native batches and between a native and an elastic one, which is information: what is
        computed together differs there natively, too; ``errors_at_once``; and all ``answers``.
    """
    pairs = {name: (answer, elastic["in_turn"][name]) for name, answer in native["in_turn"].items()}
    first, second = native["at_once"]
    return {
        "requests": len(pairs),
        "different": [name for name, pair in pairs.items() if not _same(*pair)],
        "largest_logprob_difference": max(_logprob_difference(*pair) for pair in pairs.values()),
        "distinct": {name: len(set(answer["tokens"])) for name, (answer, _) in pairs.items()},
        "at_once": {
            "requests": AT_ONCE,
            "native_native": _differences(first, second),
            "native_elastic": _differences(first, elastic["at_once"][0]),
        },
        "errors_at_once": native["errors_at_once"] + elastic["errors_at_once"],
        "answers": {"native": native, "elastic": elastic},
    }


def from_the_cache(server: Server, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Answers to prompts that the prefix cache has, against answers that are computed anew; flushes in between.

    Both are greedy. They may differ by rounding, because what is computed together is not the same; where the cache
    holds something else than it should, nothing of them agrees.

    Returns:
        ``cached_tokens`` of each prompt the first time, the ``different`` answers by number, and the
        ``largest_logprob_difference`` before that.
    """
    cached, hits = [], []
    for prompt in prompts:
        cached.append(int(server.answer(prompt, 1)["meta_info"]["cached_tokens"]))
        hits.append(_ask(server, prompt))
    server.flush()
    return {"cached_tokens": cached, **_differences(hits, [_ask(server, prompt) for prompt in prompts])}


def in_words(found: dict[str, Any]) -> str:
    """What :func:`compare` has found, in two lines."""
    distinct = found["distinct"].values()
    of = {
        kind: f"{len(which['different'])} different, log probabilities before that by"
        f" {which['largest_logprob_difference']:.2g}"
        for kind, which in found["at_once"].items()
        if kind != "requests"
    }
    return (
        f"tokens: {found['requests']} requests of {min(distinct)} to {max(distinct)} distinct ids in {TOKENS},"
        f" different {found['different']}, log probabilities differ by at most"
        f" {found['largest_logprob_difference']:.2g}; errors {found['errors_at_once']}\n"
        f"{found['at_once']['requests']} at once: native and native {of['native_native']}; native and elastic"
        f" {of['native_elastic']}"
    )


def _ask(server: Server, prompt: Sequence[int]) -> Answer:
    found, probabilities = server.generate(prompt, TOKENS)
    return {
        "tokens": found,
        "logprobs": [
            round(value, DIGITS) if value is not None and math.isfinite(value) else None for value in probabilities
        ],
    }


def _at_once(server: Server, prompt: Sequence[int], errors: list[str]) -> list[Answer]:
    """The answers in the order of the prompts."""

    def ask(number: int) -> Answer:
        begin = 100 * number
        try:
            return _ask(server, prompt[begin : begin + AT_ONCE_PROMPT])
        except (urllib.error.URLError, OSError, json.JSONDecodeError, KeyError) as error:
            errors.append(f"{number}: {error!r}")
            return {"tokens": [], "logprobs": []}

    server.flush()
    with ThreadPoolExecutor(AT_ONCE) as clients:
        return list(clients.map(ask, range(AT_ONCE)))


def _whole(answer: Answer) -> bool:
    return len(answer["tokens"]) == len(answer["logprobs"]) == TOKENS and None not in answer["logprobs"]


def _same(left: Answer, right: Answer) -> bool:
    return _whole(left) and _whole(right) and left["tokens"] == right["tokens"]


def _logprob_difference(left: Answer, right: Answer) -> float:
    """The largest one, as long as tokens are equal: beyond that other things are told."""
    largest = 0.0
    for mine, theirs, *values in zip(
        left["tokens"], right["tokens"], left["logprobs"], right["logprobs"], strict=False
    ):
        if mine != theirs:
            break
        if None not in values:
            largest = max(largest, abs(values[0] - values[1]))
    return largest


def _differences(left: Sequence[Answer], right: Sequence[Answer]) -> dict[str, Any]:
    """Of two batches: which requests have other tokens, and the largest difference of a log probability before that."""
    pairs = list(zip(left, right, strict=True))
    return {
        "different": [number for number, pair in enumerate(pairs) if not _same(*pair)],
        "largest_logprob_difference": max((_logprob_difference(*pair) for pair in pairs), default=0.0),
    }

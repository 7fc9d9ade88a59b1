"""Trace formats: Mooncake JSON lines, Azure CSV, and a seeded generator.

The format of a file is known by its first non-empty line, not by its name. A line that does not fit ends the
load with a :class:`ConfigError` that names file, line number, what is wrong and what is expected.
"""

from __future__ import annotations

import datetime as dt
import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from ..errors import ConfigError
from .workload import HASH_BLOCK_TOKENS, Request

SYNTHETIC = "synthetic"
"""Name of the generated trace."""

SYNTHETIC_REQUESTS = 120
"""Requests of the generated trace when the caller names no number."""

MAX_TOKENS = 1 << 22
"""Longest prompt or output that is believed; beyond it the line is called malformed."""

_AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_EXPECTED = (
    'expected {"timestamp": ms >= 0, "input_length": tokens >= 1, "output_length": tokens >= 1, '
    '"hash_ids": [one integer per 512 tokens]}'
)
_AZURE_EXPECTED = "expected 'YYYY-MM-DD HH:MM:SS[.fraction],context tokens >= 1,generated tokens >= 1'"

_Fields = tuple[int, int, int, tuple[int, ...]]
"""(timestamp us, prompt tokens, output tokens, hash ids) of one line."""


def load(trace: str, *, requests: int | None = None, seed: int = 0) -> list[Request]:
    """Read a trace.

    Args:
        trace: path of a Mooncake JSON-lines or Azure CSV file, or ``synthetic``.
        requests: how many requests to take from the start; None for all (the generator makes
            ``SYNTHETIC_REQUESTS``).
        seed: seed of the generator; files ignore it.

    Returns:
        Requests in arrival order, the first one at time 0.

    Raises:
        ConfigError: missing or unreadable file, unknown format, malformed line, no requests.

    Blocks: for the time of reading the file.
    """
    if requests is not None and requests < 1:
        raise ConfigError(f"--requests {requests}: give a number of at least 1")
    if trace == SYNTHETIC:
        return generate(requests or SYNTHETIC_REQUESTS, seed)
    path = Path(trace)
    if not path.is_file():
        raise ConfigError(f"--trace {trace}: no such file; give a Mooncake .jsonl or Azure .csv file, or '{SYNTHETIC}'")
    try:
        with path.open(encoding="utf-8") as lines:
            fields = list(islice(_parse(trace, lines), requests))
    except UnicodeDecodeError as error:
        raise ConfigError(f"--trace {trace}: not UTF-8 text (byte {error.start}); {_MOONCAKE_EXPECTED}") from error
    except OSError as error:
        raise ConfigError(f"--trace {trace}: cannot be read ({error.strerror}); check its permissions") from error
    if not fields:
        raise ConfigError(f"--trace {trace}: holds no requests; {_MOONCAKE_EXPECTED}")
    return _ordered(fields)


def generate(requests: int, seed: int) -> list[Request]:
    """Make a trace with bursts, multi-turn conversations and a few long documents.

    The same arguments give the same trace on every machine and Python version that keeps
    ``random.Random.random`` stable (all of them so far).

    Args:
        requests: how many, at least 1.
        seed: any integer.

    Returns:
        Requests in arrival order.
    """
    rng = random.Random(seed)
    next_hash = _counter()
    system_prompts = [[next_hash() for _ in range(2)] for _ in range(3)]
    conversations: list[list[int]] = []
    fields: list[_Fields] = []
    now_us = 0
    for number in range(requests):
        # Bursts of 12 requests, then a pause long enough that pages drain and memory goes back.
        quiet = number > 0 and number % 12 == 0
        now_us += int(6_000_000 + 4_000_000 * rng.random()) if quiet else int(400_000 * rng.random())
        continued = bool(conversations) and rng.random() < 0.4
        if continued:
            history = conversations[int(rng.random() * len(conversations))]
        else:
            history = list(system_prompts[int(rng.random() * len(system_prompts))])
            conversations.append(history)
        long = rng.random() < 0.06
        fresh = int(12_000 + 20_000 * rng.random()) if long else int(100 + 3_900 * rng.random() ** 2)
        prompt = len(history) * HASH_BLOCK_TOKENS + fresh
        whole = fresh // HASH_BLOCK_TOKENS
        history.extend(next_hash() for _ in range(whole))
        tail = (next_hash(),) if fresh % HASH_BLOCK_TOKENS else ()
        output = int(8 + 260 * rng.random() ** 2)
        fields.append((now_us, prompt, output, tuple(history) + tail))
        if len(history) > 80:
            conversations.remove(history)
    return _ordered(fields)


def _counter() -> Callable[[], int]:
    value = -1

    def following() -> int:
        nonlocal value
        value += 1
        return value

    return following


def _ordered(fields: list[_Fields]) -> list[Request]:
    # A stable sort: requests with one timestamp keep the order of the file, on every rank.
    fields.sort(key=lambda item: item[0])
    start = fields[0][0]
    return [
        Request(index, when - start, prompt, output, hashes)
        for index, (when, prompt, output, hashes) in enumerate(fields)
    ]


def _parse(trace: str, lines: Iterator[str]) -> Iterator[_Fields]:
    parse: Callable[[str], _Fields] | None = None
    for number, raw in enumerate(lines, start=1):
        line = raw.strip().removeprefix("\ufeff")
        if not line:
            continue
        if parse is None:
            if line.startswith("{"):
                parse = _mooncake
            elif tuple(part.strip() for part in line.split(",")) == _AZURE_HEADER:
                parse = _azure
                continue
            else:
                raise ConfigError(
                    f"--trace {trace}, line {number}: neither Mooncake JSON nor an Azure header; "
                    f"{_MOONCAKE_EXPECTED}, or the header '{','.join(_AZURE_HEADER)}'"
                )
        try:
            yield parse(line)
        except ValueError as error:
            expected = _MOONCAKE_EXPECTED if parse is _mooncake else _AZURE_EXPECTED
            raise ConfigError(f"--trace {trace}, line {number}: {error}; {expected}") from error


def _count(name: str, value: object, *, at_least: int, at_most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}, not an integer")
    if not at_least <= value <= at_most:
        raise ValueError(f"{name} is {value}, outside [{at_least}, {at_most}]")
    return value


def _mooncake(line: str) -> _Fields:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(item, dict):
        raise ValueError(f"a JSON {type(item).__name__}, not an object")
    for name in ("timestamp", "input_length", "output_length"):
        if name not in item:
            raise ValueError(f"{name} is missing")
    when = item["timestamp"]
    if isinstance(when, bool) or not isinstance(when, int | float) or not 0 <= when < 1e15:
        raise ValueError(f"timestamp is {when!r}, not milliseconds >= 0")
    prompt = _count("input_length", item["input_length"], at_least=1, at_most=MAX_TOKENS)
    output = _count("output_length", item["output_length"], at_least=1, at_most=MAX_TOKENS)
    hashes = item.get("hash_ids", [])
    if not isinstance(hashes, list):
        raise ValueError(f"hash_ids is {hashes!r}, not a list")
    ids = tuple(_count("hash_ids entry", value, at_least=0, at_most=(1 << 63) - 1) for value in hashes)
    if ids and len(ids) < prompt // HASH_BLOCK_TOKENS:
        raise ValueError(f"hash_ids has {len(ids)} entries, too few for {prompt} tokens")
    return round(when * 1000), prompt, output, ids


def _azure(line: str) -> _Fields:
    parts = line.split(",")
    if len(parts) != len(_AZURE_HEADER):
        raise ValueError(f"{len(parts)} fields, not {len(_AZURE_HEADER)}")
    when = _azure_time(parts[0].strip())
    counts = []
    for name, text in zip(_AZURE_HEADER[1:], parts[1:], strict=True):
        text = text.strip()
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"{name} is {text!r}, not an integer")
        counts.append(_count(name, int(text), at_least=1, at_most=MAX_TOKENS))
    return when, counts[0], counts[1], ()


def _azure_time(text: str) -> int:
    # The files carry seven fractional digits, one more than datetime understands.
    whole, _, fraction = text.partition(".")
    try:
        moment = dt.datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=dt.UTC)
    except ValueError as error:
        raise ValueError(f"TIMESTAMP is {text!r}, not a date and time") from error
    if fraction and not (fraction.isascii() and fraction.isdigit()):
        raise ValueError(f"TIMESTAMP is {text!r}: its fraction is not a number")
    return int(moment.timestamp()) * 1_000_000 + int((fraction + "000000")[:6])


__all__ = ["SYNTHETIC", "SYNTHETIC_REQUESTS", "generate", "load"]

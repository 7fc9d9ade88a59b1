"""What elastic pools cost the real engine: native and elastic servers in turn, in one run.

    .venv-sglang/bin/python scripts/bench_sglang.py [--rounds 3] [--requests 60] [--parallel 4]

Two tensor-parallel ranks of a tiny Llama on the host backend. Every round starts a native and an elastic server, in
alternating order, and asks both the same requests. The whole loop is measured, not the hooks. Rounds of the same kind
differ by the noise of the machine: a difference between the kinds means something only when it is larger than that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.sglang.cases import PROMPT
from tests.sglang.regenerate import LLAMA
from tests.sglang.server import Server
from tests.sglang.settings import CAPACITY, GRANULE

ELASTIC = {
    "ENABLE_KVCACHED": "1",
    "KVCACHED_REQUIRE": "1",
    "KVCACHED_DIST_HOST_GRANULE_BYTES": str(GRANULE),
    "KVCACHED_DIST_HOST_CAPACITY_BYTES": str(CAPACITY),
}
TOKENS = 24


@dataclass(frozen=True)
class Answer:
    """Seconds: to the first token, and from each token to the next."""

    first_s: float
    between_s: tuple[float, ...]


def ask(server: Server, prompt: Sequence[int]) -> Answer:
    """One streamed request."""
    parameters = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": list(prompt), "sampling_params": parameters, "stream": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/generate", body, {"content-type": "application/json"}
    )
    times = [time.perf_counter()]
    with urllib.request.urlopen(request, timeout=300) as stream:
        times += [time.perf_counter() for line in stream if line.startswith(b"data: {")]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return Answer(gaps[0], tuple(gaps[1:]))


def measure(settings: Mapping[str, str], requests: int, parallel: int) -> dict[str, float]:
    """One server, one load; milliseconds and requests per second."""
    prompts = [PROMPT[k % 300 : k % 300 + 100 + 37 * k % 400] for k in range(requests)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        server = LLAMA.start(Path(name), settings)
        try:
            ask(server, PROMPT[:200])
            begin = time.perf_counter()
            with ThreadPoolExecutor(parallel) as pool:
                answers = list(pool.map(lambda prompt: ask(server, prompt), prompts))
            seconds = time.perf_counter() - begin
            grows = server.grows() if settings else 0
        finally:
            server.stop()
    first = sorted(answer.first_s for answer in answers)
    between = sorted(gap for answer in answers for gap in answer.between_s)
    return {
        "requests_per_s": requests / seconds,
        "ttft_p50_ms": 1000 * statistics.median(first),
        "ttft_p99_ms": 1000 * first[int(0.99 * (len(first) - 1))],
        "tpot_p50_ms": 1000 * statistics.median(between),
        "tpot_p99_ms": 1000 * between[int(0.99 * (len(between) - 1))],
        "grows": grows,
    }


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--parallel", type=int, default=4)
    options = parser.parse_args()
    kinds: dict[str, Mapping[str, str]] = {"native": {}, "elastic": ELASTIC}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for number in range(options.rounds):
        for name in list(kinds)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(measure(kinds[name], options.requests, options.parallel))
            print(name, {key: round(value, 2) for key, value in found[name][-1].items()}, flush=True)
    print(f"\n{'':16}{'native':>22}{'elastic':>22}   median (least to most of {options.rounds} rounds)")
    for key in found["native"][0]:
        cells = []
        for name in kinds:
            values = sorted(round_[key] for round_ in found[name])
            cells.append(f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})")
        print(f"{key:16}{cells[0]:>22}{cells[1]:>22}")


if __name__ == "__main__":
    main()

"""Trace formats: what is read, and what a malformed line says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from kvcached_dist.errors import ConfigError
from kvcached_dist.replay import traces

GOOD = '{"timestamp": 27482, "input_length": 1030, "output_length": 4, "hash_ids": [46, 47, 2353]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(folder: Path, text: str, name: str = "trace.jsonl") -> str:
    path = folder / name
    path.write_bytes(text.encode())
    return str(path)


def test_mooncake_lines_become_requests_relative_to_the_first(tmp_path: Path) -> None:
    later = GOOD.replace("27482", "27500.5")
    request, second = traces.load(write(tmp_path, f"{GOOD}\n\n{later}\n"))
    assert (request.arrival_us, request.prompt_tokens, request.output_tokens) == (0, 1030, 4)
    assert request.hash_ids == (46, 47, 2353)
    assert request.full_hash_blocks == 2
    assert second.arrival_us == 18_500


def test_azure_lines_with_seven_digit_fractions_and_dos_line_ends(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 23:59:59.9799600,4808,10\n2023-11-17 00:00:00.0319600,3180,8"
    first, second = traces.load(write(tmp_path, text.replace("\n", "\r\n"), "trace.csv"))
    assert (first.arrival_us, second.arrival_us) == (0, 52_000)
    assert (second.prompt_tokens, second.output_tokens, second.hash_ids) == (3180, 8, ())


def test_requests_are_sorted_by_arrival_and_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    lines = [
        GOOD.replace("27482", str(when)).replace("1030", str(size)) for when, size in ((9, 1025), (3, 1026), (3, 1027))
    ]
    assert [r.prompt_tokens for r in traces.load(write(tmp_path, "\n".join(lines)))] == [1026, 1027, 1025]


def test_only_the_requests_asked_for_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, f"{GOOD}\n{GOOD}\nrubbish\n")
    assert len(traces.load(path, requests=2)) == 2


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON list"),
        ('{"timestamp": 1, "input_length": 5}', "output_length is missing"),
        (GOOD.replace("1030", '"many"'), "input_length is 'many'"),
        (GOOD.replace("1030", "0"), "input_length is 0"),
        (GOOD.replace("1030", "9" * 9), "input_length is 999999999"),
        (GOOD.replace("1030", "true"), "input_length is True"),
        (GOOD.replace("1030", "4096"), "hash_ids has 3 entries"),
        (GOOD.replace("27482", "-1"), "timestamp is -1"),
        (GOOD.replace("27482", "NaN"), "timestamp is nan"),
        (GOOD.replace("2353", "-2353"), "hash_ids entry is -2353"),
        (GOOD.replace("[46, 47, 2353]", "7"), "hash_ids is 7"),
    ],
)
def test_a_malformed_mooncake_line_is_named_with_what_is_expected(tmp_path: Path, line: str, what: str) -> None:
    path = write(tmp_path, f"{GOOD}\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        traces.load(path)
    text = str(caught.value)
    assert f"{path}, line 2: " in text
    assert what in text
    assert '"input_length": tokens >= 1' in text


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("2023-11-16 18:17:03.9799600,4808", "2 fields"),
        ("yesterday,4808,10", "TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:17:03.xyz,4808,10", "its fraction is not a number"),
        ("2023-11-16 18:17:03,many,10", "ContextTokens is 'many'"),
        ("2023-11-16 18:17:03,4808,0", "GeneratedTokens is 0"),
        ("2023-11-16 18:17:03,-4808,1", "ContextTokens is '-4808'"),
    ],
)
def test_a_malformed_azure_line_is_named_with_what_is_expected(tmp_path: Path, line: str, what: str) -> None:
    path = write(tmp_path, AZURE + line)
    with pytest.raises(ConfigError) as caught:
        traces.load(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert what in str(caught.value)
    assert "YYYY-MM-DD HH:MM:SS" in str(caught.value)


@pytest.mark.parametrize(("text", "what"), [("", "holds no requests"), ("a,b,c\n", "line 1: neither Mooncake JSON")])
def test_a_file_without_a_known_format_is_refused(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        traces.load(write(tmp_path, text))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        traces.load(str(path))


def test_a_missing_file_names_what_would_work() -> None:
    with pytest.raises(ConfigError, match=r"--trace /nowhere\.jsonl: no such file; .*synthetic"):
        traces.load("/nowhere.jsonl")


def test_a_number_of_requests_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="--requests 0"):
        traces.load("synthetic", requests=0)


def test_the_generator_is_a_function_of_its_seed() -> None:
    assert traces.generate(60, 5) == traces.generate(60, 5)
    assert traces.generate(60, 5) != traces.generate(60, 6)
    # Pinned, so that a run of last year can be repeated.
    first = traces.generate(3, 0)[0]
    assert (first.prompt_tokens, first.output_tokens, first.hash_ids[:2]) == PINNED


PINNED = (1385, 75, (4, 5))


def test_the_generator_shares_prefixes_and_leaves_pauses() -> None:
    requests = traces.load("synthetic", requests=60)
    assert [r.index for r in requests] == list(range(60))
    gaps = [b.arrival_us - a.arrival_us for a, b in pairwise(requests)]
    assert max(gaps) > 4_000_000 > 500_000 > sorted(gaps)[len(gaps) // 2]
    seen = {r.hash_ids[:3] for r in requests if r.full_hash_blocks >= 3}
    assert len(seen) < sum(r.full_hash_blocks >= 3 for r in requests)
    assert all(len(r.hash_ids) * 512 >= r.prompt_tokens for r in requests)

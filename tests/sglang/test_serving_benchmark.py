"""What the serving benchmark says of servers: equal answers, steps, memory down to the budget; and its weights."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from scripts.serving import budget, equality, load
from scripts.serving.load import Answer
from scripts.serving.server import Server
from scripts.serving.slices import Turns
from scripts.serving.weights import seeded_weights


class Asked(Server):
    """A server that is not there; its answers depend on the prompt, its log has a line per prefill."""

    def __init__(self, folder: Path, *, elastic: bool = False) -> None:
        super().__init__("asked", elastic, 0, folder, cast(subprocess.Popen[bytes], None), {}, 4000)
        self.step, self.steps_of_a_request, self.printed = 0, 2, ""

    def generate(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        self.printed += f"Prefill batch [{self.step + 1}], #new-seq: 1\n"
        self.step += self.steps_of_a_request + tokens - 1
        found = [(sum(prompt) + place) % 500 for place in range(tokens)]
        return found, [-token / 100 for token in found]

    def answer(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {"meta_info": {"cached_tokens": 0 if self.printed.endswith("flushed\n") else len(prompt) - 1}}

    def flush(self) -> None:
        self.printed += "Cache flushed\n"

    def log(self) -> str:
        return self.printed


def answers(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return equality.tokens(Asked(folder)), equality.tokens(Asked(folder, elastic=True))


def test_equal_answers_are_equal_and_say_how_many_ids_they_have(tmp_path: Path) -> None:
    native, elastic = answers(tmp_path)
    found = equality.compare(native, elastic)
    assert (found["requests"], found["different"], found["largest_logprob_difference"]) == (5, [], 0)
    assert set(found["distinct"].values()) == {equality.TOKENS}
    assert found["at_once"]["native_native"] == found["at_once"]["native_elastic"] == {
        "different": [], "largest_logprob_difference": 0,
    }  # fmt: skip
    assert found["answers"] == {"native": native, "elastic": elastic}
    assert (len(native["at_once"]), len(elastic["at_once"])) == (2, 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: answer["tokens"].__setitem__(3, -1),
        lambda answer: answer["logprobs"].__setitem__(3, None),
        lambda answer: (answer["tokens"].clear(), answer["logprobs"].clear()),
        lambda answer: answer["logprobs"].clear(),
    ],
    ids=["token", "no number", "empty", "no log probabilities"],
)
def test_an_answer_that_differs_or_is_not_whole_counts(tmp_path: Path, spoil: Any) -> None:
    native, elastic = answers(tmp_path)
    spoil(elastic["in_turn"]["flushed"])
    spoil(elastic["at_once"][0][2])
    found = equality.compare(native, elastic)
    assert found["different"] == ["flushed"]
    assert found["at_once"]["native_native"]["different"] == []
    assert found["at_once"]["native_elastic"]["different"] == [2]


def test_answers_that_are_empty_on_both_sides_count(tmp_path: Path) -> None:
    native, elastic = answers(tmp_path)
    for side in (native, elastic):
        side["in_turn"]["flushed"] = {"tokens": [], "logprobs": []}
    assert equality.compare(native, elastic)["different"] == ["flushed"]


def test_log_probabilities_are_compared_up_to_the_first_other_token(tmp_path: Path) -> None:
    native, elastic = answers(tmp_path)
    mine = elastic["in_turn"]["flushed"]
    mine["logprobs"][1] += 0.25
    mine["tokens"][2] = -1
    mine["logprobs"][3] += 100
    assert equality.compare(native, elastic)["largest_logprob_difference"] == pytest.approx(0.25)


def test_steps_are_counted_without_those_that_the_count_takes(tmp_path: Path) -> None:
    server = Asked(tmp_path)
    server.step = 10
    assert [server.steps() for _ in range(3)] == [10] * 3
    server.step += 7
    assert [server.steps() for _ in range(2)] == [17] * 2


def states(used: int, published: int, at_s: float) -> list[dict[str, Any]]:
    pools = {
        "kv": {"domain": "full", "mapped_bytes": 10 * published, "static_bytes": 40_000},
        "window": {"domain": "swa", "mapped_bytes": 7, "static_bytes": 7},
    }
    domain = {"blocks": 4001, "blocks_per_page": 10, "published": published, "free": published - used - 1}
    return [{"domains": {"full": domain}, "pools": pools, "updated": at_s}]


def seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: Sequence[tuple[int, int]]
) -> tuple[dict[str, Any], Asked]:
    """A load on an elastic server whose snapshots say this afterwards, the last one for ever; the first one is old."""
    server = Asked(tmp_path, elastic=True)
    server.settings = {"KVCACHED_MAX_CACHED_TOKENS": "100", "KVCACHED_MIN_RESERVED_PAGES": "2"}
    clock = itertools.count(100.0, 0.01)
    monkeypatch.setattr(budget, "time", SimpleNamespace(
        perf_counter=lambda: next(clock), time=lambda: 100.0, sleep=lambda _: asked.append(1)
    ))  # fmt: skip
    monkeypatch.setattr(load, "play", lambda *_: [Answer(0.0, 1, [1.0])])
    monkeypatch.setattr(budget, "watched", lambda _: _Watched([(0.0, [39_000]), (0.1, [40_000])]))
    asked: list[int] = []

    def now() -> list[dict[str, Any]]:
        if not asked:
            return states(0, 30, 99.0)
        used, published = after[min(len(asked), len(after)) - 1]
        return states(used, published, 101.0)

    monkeypatch.setattr(server, "states", now)
    requests = [load.Request(0.0, (5, 6, 7), 1)] * 20
    return budget.down_to_the_budget(server, requests, 1), server


class _Watched:
    def __init__(self, series: list[tuple[float, list[int]]]) -> None:
        self.series = series

    def __enter__(self) -> list[tuple[float, list[int]]]:
        return self.series

    def __exit__(self, *_: object) -> None:
        pass


def test_what_comes_back_without_a_flush_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, server = seen(tmp_path, monkeypatch, [(3500, 3900), (100, 3900), (90, 130)])
    assert (found["budget_tokens"], found["reserve_tokens"], found["allowed_bytes"]) == (100, 30, [1300])
    assert (found["after_load"]["in_use"], found["after_load"]["mapped_bytes"]) == (3500, [39_000])
    assert (found["after"]["published"], found["after"]["mapped_bytes"]) == (130, [1300])
    assert found["peak"] == [40_000]
    assert 0 < found["evicted_s"] < found["returned_s"] < 1
    assert found["hits"] == {"cached_tokens": [2] * 8, "different": [], "largest_logprob_difference": 0.0}
    assert server.printed.endswith("Cache flushed\n")


def test_memory_that_does_not_come_back_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = seen(tmp_path, monkeypatch, [(3500, 3900), (100, 131)])
    assert found["evicted_s"] is not None
    assert found["returned_s"] is None
    assert found["after"]["published"] == 131
    assert found["after"]["at_s"] > budget.STILL_S


def test_weights_keep_the_size_of_what_goes_through_them() -> None:
    model = torch.nn.ModuleDict(
        {
            "embed_tokens": torch.nn.Embedding(50, 400),
            "one": torch.nn.Linear(400, 300, bias=False),
            "other": torch.nn.Linear(400, 300, bias=False),
            "q_norm": torch.nn.RMSNorm(64),
            "final_norm": torch.nn.RMSNorm(64),
            "eight": torch.nn.ParameterDict(
                {
                    "weight": torch.nn.Parameter(torch.zeros(64, 48).to(torch.float8_e4m3fn), requires_grad=False),
                    "weight_scale_inv": torch.nn.Parameter(torch.zeros(1, 1)),
                    "count": torch.nn.Parameter(torch.full((3,), 7), requires_grad=False),
                }
            ),
        }
    )
    before: list[str] = []
    seeded_weights.draw(lambda model: before.append("engine"), model)
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert before == ["engine"]
    assert float(found["embed_tokens.weight"].std()) == pytest.approx(1, abs=0.05)
    through = found["one.weight"] @ torch.randn(400, 500, generator=torch.Generator().manual_seed(1))
    assert float(through.std()) == pytest.approx(1, abs=0.1)
    assert not torch.equal(found["one.weight"], found["other.weight"])
    assert 1.5 <= float(found["q_norm.weight"].min()) <= float(found["q_norm.weight"].max()) <= 2.5
    assert 0.5 <= float(found["final_norm.weight"].min()) <= float(found["final_norm.weight"].max()) <= 1.5
    assert len({*found["eight.weight"].float().flatten().tolist()}) > 20
    assert found["eight.weight_scale_inv"].tolist() == [[1.0]]
    assert found["eight.count"].tolist() == [7, 7, 7]
    seeded_weights.draw(lambda _: None, model)
    again = dict(model.named_parameters())
    assert all(torch.equal(found[name].float(), again[name].detach().float()) for name in found)


@pytest.mark.slow  # imports the engine
def test_the_engine_has_what_the_weights_are_drawn_after() -> None:
    import inspect

    from sglang.srt.model_loader import loader, weight_utils

    assert loader.initialize_dummy_weights is weight_utils.initialize_dummy_weights
    assert next(iter(inspect.signature(weight_utils.initialize_dummy_weights).parameters)) == "model"


def test_the_clock_of_a_server_stands_still_while_it_is_stopped() -> None:
    turns = Turns()
    turns.took(10.0, 11.0)
    turns.took(12.0, 13.5)
    shown = [turns.at(now) for now in (9.0, 10.0, 10.25, 11.0, 11.5, 12.0, 12.5, 13.5, 20.0)]
    assert shown == [0.0, 0.0, 0.25, 1.0, 1.0, 1.0, 1.5, 2.5, 2.5]
    answer = turns.seen(Answer(0.5, 3, [1.75, 2.25, 3.0], "cut"), 9.75)
    assert answer == Answer(0.25, 3, [1.0, 1.0, 1.75], "cut")

"""Where steps wait for the device, as the serving benchmark counts it: whose place, which steps, which servers."""

from __future__ import annotations

import json
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.serving import syncs
from scripts.serving.inside import sync_places


class Scheduler:
    """An engine that launches what it is given."""

    def run_batch(self, work: Callable[[], None]) -> None:
        work()


def function(path: str, source: str, **known: Any) -> Callable[[], None]:
    """A function ``step`` whose code is in another file."""
    exec(compile(f"def step():\n    {source}\n", path, "exec"), known)
    made: Callable[[], None] = known["step"]
    return made


def waits() -> None:
    warnings.warn(sync_places.SAID + " (Triggered internally)", stacklevel=2)


@pytest.fixture
def shown() -> list[str]:
    """Warnings that went where they always go."""
    return []


@pytest.fixture
def places(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[sync_places.Places]:
    launch = Scheduler.run_batch
    with warnings.catch_warnings():
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
        listening = sync_places.Places()
        listening.count_steps(Scheduler)
        listening.listen()
        yield listening
    Scheduler.run_batch = launch  # type: ignore[method-assign]


def test_a_wait_belongs_to_whoever_asked_for_it(places: sync_places.Places) -> None:
    engine = function("/site/managers/scheduler.py", "waits()", waits=waits)
    ours = function("/site/kvcached_dist/sglang/lists.py", "engine()", engine=engine)
    for work in (engine, engine, ours):
        Scheduler().run_batch(work)
    assert places.steps == 3
    through = f"unit/{Path(__file__).name}:waits"
    assert dict(places.counts) == {
        f"{through} for kvcached_dist/sglang/lists.py:step": 1,
        through: 2,
    }
    assert syncs.Waits(3, places.counts).ours().total() == 1


def test_who_stands_in_front_of_the_one_that_shows_warnings_is_no_place(places: sync_places.Places) -> None:
    """SGLang does."""
    heard = warnings.showwarning

    def _filtered_showwarning(*args: Any, **others: Any) -> None:
        heard(*args, **others)

    warnings.showwarning = _filtered_showwarning
    Scheduler().run_batch(waits)
    assert list(places.counts) == [f"unit/{Path(__file__).name}:waits"]


def test_other_warnings_and_other_threads_do_not_count(places: sync_places.Places, shown: list[str]) -> None:
    warnings.warn("something else", stacklevel=1)
    assert shown == ["something else"]
    other = threading.Thread(target=waits)
    other.start()
    other.join(10)
    assert not places.counts
    waits()
    assert places.counts.total() == 1, "it had not listened"


def test_what_servers_have_written_is_summed_and_what_was_before_is_left_out(tmp_path: Path) -> None:
    def written(name: str, steps: int, **of: int) -> None:
        found = {"steps": steps, "places": {f"{place}:f": count for place, count in of.items()}}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))

    written("inside-a-1", 10, engine=5)
    before = syncs.read(tmp_path, ["inside-a", "inside-b"])
    written("inside-a-1", 110, engine=105)
    written("inside-b-2", 100, engine=100)
    heard = syncs.read(tmp_path, ["inside-a", "inside-b"]).since(before)
    assert heard == syncs.Waits(200, Counter({"engine:f": 200}))
    assert not heard.ours()


def test_what_a_hook_lets_torch_do_is_ours() -> None:
    found = syncs.Waits(10, Counter({"torch/functional.py:unique for kvcached_dist/rows.py:admit": 3, "a:b": 1}))
    assert found.ours().total() == 3

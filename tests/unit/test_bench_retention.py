"""The model of what long runs keep grows as the leader does."""

from __future__ import annotations

from typing import Any

import pytest

from kvcached_dist.coord.core.types import DomainId, PageId, Run
from scripts.bench import retention as model
from tests.unit.core import rig as rigs

PAGES = 3000


@pytest.mark.parametrize("share", [0, 8, 2])
def test_the_model_grows_by_the_same_runs_as_the_leader(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs, "PAGES", PAGES)
    monkeypatch.setattr(model, "PAGES", PAGES)
    ahead = model.AHEAD // model.PAGE_TOKENS
    settings: dict[str, Any] = {"run_pages_min": 1, "run_pages_max": model.RUN_PAGES_MAX, "run_share": share}
    pool = model.Pool(share)
    rig = rigs.Rig(5 * PAGES * rigs.PAGE, demand_window=0, **settings)
    rig.grow(Run(DomainId(0), PageId(0), 1))
    while pool.grow():
        rig.lists[0].take(PAGES)
        rig.step(wanted={0: ahead})
        txn = rig.leader.commit.txn
        assert txn is not None
        found = [range(run.first, run.end) for run in txn.runs]
        assert pool.runs[-len(found) :] == found
        rig.finish()
        rig.step()
    assert pool.runs[-1].stop == PAGES

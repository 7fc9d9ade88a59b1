"""The real thing: a plan with every kind of fault on Ray actors of this machine."""

from __future__ import annotations

import pytest

from kvcached_dist.chaos.options import ChaosOptions
from kvcached_dist.chaos.plan import Kind
from kvcached_dist.chaos.run import run_chaos

pytest.importorskip("ray", reason="the lane needs Ray: pip install 'kvcached_dist[chaos]'")


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_every_kind_of_fault_once() -> None:
    options = ChaosOptions(tp=2, pp=2, faults=len(Kind), seed=3, lease_s=2.5)
    options.validate()
    lines: list[str] = []
    report = run_chaos(options, lambda outcome: lines.append(outcome.line()))
    assert report.all_violations() == [], "\n".join(lines)
    data = report.to_json()
    assert set(data["by_kind"]) == {kind.value for kind in Kind}
    assert all(kind["injected"] == 1 and kind["unanswered"] == 0 for kind in data["by_kind"].values())
    assert (data["orphans"], data["leaked_bytes"], data["files"]) == (0, 0, 0)
    assert data["requests"]["answered"] > 0
    assert data["blocks"]["verified"] > 0
    assert data["rejoin_ms"]["max"] is not None

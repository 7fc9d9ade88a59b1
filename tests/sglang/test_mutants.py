"""The mutants of the plugin still apply; whether they are found is asked by ``./scripts/test_sglang --mutants``."""

from __future__ import annotations

from tests.sglang.mutants import MUTANTS, UNBROKEN
from tests.simulation.mutation import ROOT


def test_mutants_still_apply() -> None:
    mutants = (UNBROKEN, *MUTANTS)
    assert [mutant.name for mutant in mutants if (ROOT / mutant.file).read_text().count(mutant.old) != 1] == []
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names)

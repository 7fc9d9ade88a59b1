"""The model of the protocol: the small searches hold, and the checker's reports are read correctly."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "model"

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None,
    reason="the model checker is not installed: apt-get update && apt-get install -y spin gcc",
)


def load_script() -> ModuleType:
    """Import scripts/model, which has no suffix."""
    loader = importlib.machinery.SourceFileLoader("model_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader("model_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["model_script"] = module
    loader.exec_module(module)
    return module


model = load_script()

COMPLETE = """
State-vector 352 byte, depth reached 44451, errors: 0
   307541 states, stored
  240.781\ttotal actual memory usage
unreached in proctype Leader
\t/somewhere/grow.pml:210, state 158, "-end-"
"""


def test_every_rule_and_every_variant_of_the_study_has_a_mutant() -> None:
    names = {mutant.name.split("_")[0] for mutant in model.MUTANTS}
    assert {*"BCDEFGHI"} <= names
    assert {f"M{rule}" for rule in range(1, 10)} <= names
    assert {"UNMAP_ONLINE", "PUBLISH_AFTER_RESERVE", "RETIRE_LOCAL"} <= {mutant.name for mutant in model.MUTANTS}


def test_every_switch_of_a_mutant_is_in_the_source_of_its_model() -> None:
    for kind, variants in (("MUTANT", model.MUTANTS), ("GAP", model.GAPS)):
        for variant in variants:
            assert f"{kind}_{variant.name}" in (model.MODELS / f"{variant.model}.pml").read_text(), variant.name


def test_a_complete_report_holds() -> None:
    result = model.parse(COMPLETE, model.SEARCHES[0])
    assert (result.violated, result.problem, result.unreached) == ("", "", [])
    assert (result.states, result.depth, result.megabytes) == (307541, 44451, 240.781)


@pytest.mark.parametrize(
    ("line", "property_name"),
    [
        ("pan:1: assertion violated (S2||(did_map[txn]==7)) (at depth 7)", "S2"),
        ("pan:1: assertion violated ((S10||handle[r])) (at depth 7)", "S10"),
        ("pan:1: invalid end state (at depth 9)", "L1 (a wait without end)"),
        ("pan:1: acceptance cycle (at depth 9)", "liveness: "),
    ],
)
def test_a_violation_names_its_property(line: str, property_name: str) -> None:
    report = line + "\n" + COMPLETE.replace("errors: 0", "errors: 1")
    assert model.parse(report, model.SEARCHES[0]).violated == property_name


@pytest.mark.parametrize(
    "line",
    ["error: max search depth too small", "pan: reached -DMEMLIM bound", "pan:1: block in d_step seq (at depth 7)"],
)
def test_an_incomplete_search_does_not_hold(line: str) -> None:
    report = line + "\n" + COMPLETE.replace("errors: 0", "errors: 1" if "block" in line else "errors: 0")
    result = model.parse(report, model.SEARCHES[0])
    assert result.problem
    assert not result.violated


def test_a_statement_that_never_ran_is_reported() -> None:
    report = COMPLETE + '\t/somewhere/grow.pml:99, state 12, "phase = FAILED"\n'
    assert len(model.parse(report, model.SEARCHES[0]).unreached) == 1


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("name", [search.name for search in model.SEARCHES if search.quick])
def test_a_small_search_holds(name: str) -> None:
    ran = subprocess.run([str(SCRIPT), "--only", name], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("| holds |") == 1


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("name", ["C", "G", "H", "PUBLISH_AFTER_RESERVE", "M6_FALLS_LATE", "TWO_QUERIES_IN_ALL"])
def test_a_wrong_variant_is_found(name: str) -> None:
    ran = subprocess.run([str(SCRIPT), "--only", name], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "NOT CAUGHT" not in ran.stdout

"""What holds for the source of the core: one writer for each state, every rule checked and broken by a test, -O."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_dist.coord.core.errors import InvariantViolation
from kvcached_dist.coord.core.invariants import RULES, require

ROOT = Path(__file__).resolve().parents[3]
CORE = ROOT / "coord" / "core"
CHECKERS = (
    *sorted(CORE.glob("*.py")),
    ROOT / "kvcached_dist" / "agent.py",
    ROOT / "kvcached_dist" / "marks.py",
    *sorted((ROOT / "tests/simulation").glob("*.py")),
)

WRITERS = {
    ("pages.py", "_states"): {"__init__", "become"},
    ("transaction.py", "step"): {"enter"},
    ("runs.py", "_runs"): {"__init__", "become"},
    ("records.py", "phase"): {"enter"},
}
"""Attribute that holds the state of a machine -> functions of that file that may write it."""

OWNERS = {"_states": ("pages.py",), "_runs": ("pages.py", "runs.py")}
"""Attributes that only these files write (the table of pages has a list of runs of its own)."""


def writes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(function, attribute) of every assignment to an attribute or to an item of one."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign | ast.AugAssign):
                targets = [node.target]
            elif isinstance(node, ast.Delete):
                targets = node.targets
            for target in targets:
                while isinstance(target, ast.Subscript):
                    target = target.value
                if isinstance(target, ast.Attribute):
                    yield function.name, target.attr


@pytest.mark.parametrize(("file", "attribute"), WRITERS)
def test_the_transition_table_has_one_writer(file: str, attribute: str) -> None:
    found = {function for function, name in writes(ast.parse((CORE / file).read_text())) if name == attribute}
    assert found <= WRITERS[file, attribute]
    assert found - {"__init__"}, "the table names an attribute that is not written any more"


@pytest.mark.slow
def test_no_other_file_writes_the_state_of_a_machine() -> None:
    strangers = [
        f"{path.name}: {function} writes {name}"
        for path in CORE.glob("*.py")
        for function, name in writes(ast.parse(path.read_text()))
        if name in OWNERS and path.name not in OWNERS[name]
    ]
    assert strangers == []


def test_the_core_does_not_use_assert_for_rules() -> None:
    """An ``assert`` may only narrow a type after ``require`` has checked: it is gone under -O."""
    wrong = []
    for path in CORE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert) and not re.search(r"is not None$|^isinstance\(", ast.unparse(node.test)):
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def test_every_rule_is_checked_somewhere() -> None:
    text = "\n".join(path.read_text() for path in CHECKERS if not path.name.startswith("test_"))
    cited = set(re.findall(r'"([SL]\d+)"', text.replace((CORE / "invariants.py").read_text(), "")))
    cited |= {"L4"} if "delays_no_other" in (ROOT / "tests/simulation/test_rules.py").read_text() else set()
    assert set(RULES) - cited == set()


def test_every_rule_is_broken_by_a_test() -> None:
    provoked: set[str] = set()
    for path in (*ROOT.glob("tests/unit/core/test_*.py"), *ROOT.glob("tests/simulation/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "provokes":
                        provoked |= {ast.literal_eval(argument) for argument in decorator.args}
    assert set(RULES) - provoked == set()


def test_an_unknown_rule_cannot_be_cited() -> None:
    with pytest.raises(KeyError):
        require(False, "S99", "nothing")


def test_a_violation_says_what_the_rule_is() -> None:
    with pytest.raises(InvariantViolation, match=r"^S6 violated: here \(rule: a page is in one state"):
        require(False, "S6", "here")


@pytest.mark.slow
def test_rules_hold_under_optimisation() -> None:
    code = (
        "import sys; assert False, 'asserts are on';"
        "from kvcached_dist.coord.core.invariants import require\n"
        "try:\n    require(False, 'S1', 'x')\nexcept Exception as error:\n    print(type(error).__name__)"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "InvariantViolation", done.stderr


@pytest.mark.slow
def test_a_schedule_runs_under_optimisation() -> None:
    command = [sys.executable, "-O", "-S", "-m", "tests.simulation", "--replay", "77", "--lines", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-600:] + done.stderr[-600:]
    plain = subprocess.run([command[0], *command[2:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert plain.stdout == done.stdout, "the same trace with and without asserts"

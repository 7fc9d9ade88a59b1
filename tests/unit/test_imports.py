"""The architecture as data: which component may import which, and what of others' each may import.

Read from the syntax trees, so that an import inside a function counts as much as one at the top.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "kvcached_dist"


@dataclass(frozen=True, slots=True)
class Component:
    """A part of the package.

    Attributes:
        modules: modules and packages that it consists of, by their name below the package.
        imports: components that it may import, besides itself.
        external: what it may import from outside, besides the standard library.
    """

    modules: tuple[str, ...]
    imports: tuple[str, ...] = ()
    external: tuple[str, ...] = ()


BELOW_AGENT = ("core", "ground", "native", "links", "pools", "process-wide")
BELOW_ENGINES = (*BELOW_AGENT, "agent", "coordinator")

ARCHITECTURE = {
    "core": Component(("coord", "coord.core")),
    "links": Component(("coord.links",), imports=("core",), external=("torch",)),
    "native": Component(("_native",), external=("numpy",)),
    "ground": Component(
        ("errors", "config", "setting_table", "setting_kinds", "settings_doc", "world", "processes", "exit_hooks"),
        imports=("core",),
    ),
    "pools": Component(("pools",), imports=("core", "ground", "native"), external=("torch", "numpy")),
    # What several processes of a machine share (turns, snapshots), and what is done to a process (faults).
    "process-wide": Component(
        ("admission", "fault_specs", "faults", "snapshot", "snapshot_file", "snapshot_schema"),
        imports=("core", "ground"),
    ),
    "agent": Component(
        (
            "agent",
            "agent_clock",
            "agent_ports",
            "bootstrap",
            "cuda_fence",
            "driver_work",
            "ending",
            "marks",
            "physical",
            "rank_links",
            "routing",
        ),
        imports=BELOW_AGENT,
        external=("torch",),
    ),
    "coordinator": Component(
        ("coordinator", "stream", "rank", "domain", "parts", "startup", "observe"),
        imports=(*BELOW_AGENT, "agent"),
        external=("torch", "numpy"),
    ),
    "engines": Component(("sglang",), imports=BELOW_ENGINES, external=("torch", "numpy", "sglang")),
    "replay": Component(
        ("replay",), imports=(*BELOW_ENGINES, "package"), external=("torch", "numpy", "matplotlib", "rich")
    ),
    "chaos": Component(
        ("chaos",), imports=(*BELOW_ENGINES, "package", "replay"), external=("torch", "numpy", "ray", "rich", "psutil")
    ),
    "cli": Component(
        ("cli",),
        imports=(*BELOW_ENGINES, "package", "engines", "replay", "chaos"),
        external=("typer", "rich"),
    ),
    # The package itself only hands on public names.
    "package": Component(("",), imports=BELOW_ENGINES),
}
"""Who may import whom. A module belongs to the component that names it or the nearest package above it."""

COMPONENTS = {module: name for name, component in ARCHITECTURE.items() for module in component.modules}


def component_of(module: str) -> str | None:
    """The component of a module of the package (name relative to the package), ``None`` where none is declared."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((COMPONENTS[name] for name in names if name in COMPONENTS), None)


def modules() -> dict[str, Path]:
    """All modules, by their name relative to the package ("" is the package)."""
    found = {}
    for folder, prefix in ((ROOT / PACKAGE, ()), (ROOT / "coord", ("coord",))):
        for path in [*folder.rglob("*.py"), *folder.rglob("*.pyi")]:
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            if folder.name == PACKAGE and parts[0] == "coord":
                continue  # the link to the other folder
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a module imports."""
    is_package = path.stem == "__init__"
    here = [PACKAGE, *(module.split(".") if module else [])]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = [] if not node.level else here[: len(here) - node.level + is_package]
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def target_module(name: str, known: dict[str, Path]) -> str:
    """The module of the package that an imported absolute name lies in, relative to the package."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in known and ".".join(parts) not in COMPONENTS:
        parts.pop()
    return ".".join(parts)


def violations(module: str, path: Path, known: dict[str, Path]) -> list[str]:
    """What one module imports against the table."""
    name = component_of(module)
    if name is None:
        return [f"{path}: add module {module} to a component of ARCHITECTURE"]
    component, found = ARCHITECTURE[name], []
    for line, imported in imports_of(module, path):
        top = imported.split(".")[0]
        if top == PACKAGE:
            allowed = component_of(target_module(imported, known)) in (name, *component.imports)
        else:
            allowed = top in sys.stdlib_module_names or top in component.external
        if not allowed:
            found.append(f"{path}:{line}: {name} must not import {imported}")
    return found


@pytest.mark.slow
def test_every_import_follows_the_architecture() -> None:
    known = modules()
    assert len(known) > 10
    assert [text for module, path in known.items() for text in violations(module, path, known)] == []


def test_every_module_of_the_table_is_named_once() -> None:
    named = [module for component in ARCHITECTURE.values() for module in component.modules]
    assert len(named) == len(COMPONENTS)


def test_the_table_has_no_cycle() -> None:
    done: set[str] = set()
    while left := set(ARCHITECTURE) - done:
        ready = {name for name in left if set(ARCHITECTURE[name].imports) <= done}
        assert ready, f"these components import one another: {sorted(left)}"
        done |= ready


def written_architecture(text: str) -> dict[str, tuple[set[str], set[str]]]:
    """The table of ``docs/design.md``: modules and imports of each component."""
    written: dict[str, tuple[set[str], set[str]]] = {}
    for name, modules_cell, imports_cell in re.findall(
        r"^\| ([a-z-]+) \| [^|]* \| ((?:`\w[\w.]*`(?:, )?)+) \| ([a-z, -]+) \|$", text, flags=re.MULTILINE
    ):
        allowed = set(imports_cell.split(", ")) - {"nothing"}
        if imports_cell.startswith("all above"):
            allowed = set(written) - set(imports_cell.removeprefix("all above").removeprefix(" but ").split(", "))
        written[name] = (set(re.findall(r"`([\w.]+)`", modules_cell)), allowed)
    return written


def test_the_table_of_the_design_is_this_table() -> None:
    here = {
        name: ({module or "__init__" for module in component.modules if module != "coord"}, set(component.imports))
        for name, component in ARCHITECTURE.items()
    }
    assert written_architecture((ROOT / "docs" / "design.md").read_text()) == here


def test_the_protocol_core_uses_the_standard_library_only() -> None:
    assert ARCHITECTURE["core"] == Component(("coord", "coord.core"))
    assert component_of("coord.core.types") == "core"
    assert component_of("coord.links.codec") == "links"


def test_coord_refers_to_itself_relatively() -> None:
    absolute = [
        f"{path}:{node.lineno}"
        for path in (ROOT / "coord").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level
        if (node.module or "").split(".")[0] in (PACKAGE, "coord")
    ]
    assert absolute == []


@pytest.mark.parametrize(
    ("module", "source", "hit"),
    [
        ("coord.core.log", "import torch", "torch"),
        ("coord.core.log", "def f():\n    from ..links import codec", "coord.links"),
        ("coord.core.log", "from kvcached_dist.config import Config", "config"),
        ("coord.links.gloo", "from ..core import types\nimport torch", None),
        ("coord.links.gloo", "from ...agent import Agent", "agent"),
        ("pools.specs", "from ..coord.links import gloo", "coord.links"),
        ("pools.backing", "from .. import _native", None),
        ("agent", "from . import coordinator", "coordinator"),
        ("agent", "import ray", "ray"),
        ("replay.worker", "from ..coordinator import Coordinator", None),
        ("coordinator", "from .replay import worker", "replay"),
        ("novelty", "import os", "add module novelty"),
    ],
)
def test_the_rule_itself(tmp_path: Path, module: str, source: str, hit: str | None) -> None:
    path = tmp_path / f"{module.split('.')[-1]}.py"
    path.write_text(source)
    found = violations(module, path, modules())
    assert len(found) == (hit is not None)
    assert all(hit in text for text in found if hit)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "absent"), [("coord.core", "torch"), ("coord.core", "numpy"), ("errors", "torch")])
def test_an_import_loads_nothing_heavy(module: str, absent: str) -> None:
    code = f"import sys, {PACKAGE}.{module}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30, check=False).returncode == 0

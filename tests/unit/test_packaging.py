"""What is installed is complete: version, entry points, type information, and the files of the wheel and the sdist."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvcached_dist

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTION = "kvcached-dist"

INSTALLED_PROBE = """
import importlib.metadata, pathlib, kvcached_dist, kvcached_dist.coord, kvcached_dist.coord.core.types
from kvcached_dist import _native
here = pathlib.Path(kvcached_dist.__file__).parent
assert here.parent == pathlib.Path({target!r}), here
assert pathlib.Path(kvcached_dist.coord.__file__).parent == here / "coord"
assert pathlib.Path(_native.__file__).parent == here
_native.HostDevice(1 << 20, 4096)
print(importlib.metadata.version("kvcached-dist"))
"""


def python_files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for pattern in ("*.py", "*.pyi", "py.typed") for path in folder.rglob(pattern)
    }


def test_the_version_is_the_same_everywhere() -> None:
    installed = importlib.metadata.version(DISTRIBUTION)
    assert kvcached_dist.__version__ == installed
    assert PROJECT.get("version", installed) == installed
    released = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert "Unreleased" in released or installed in released


def test_type_information_is_marked() -> None:
    assert (ROOT / "kvcached_dist" / "py.typed").is_file()
    assert (ROOT / "kvcached_dist" / "_native.pyi").is_file()


def test_the_command_is_an_entry_point() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="kvcached-dist")
    assert len(scripts) == 1
    assert callable(next(iter(scripts)).load())


def test_the_licence_is_named_and_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_every_pin_that_is_needed_exists() -> None:
    pins = re.findall(r"^([A-Za-z0-9.-]+)==", (ROOT / "scripts" / "constraints.txt").read_text(), flags=re.MULTILINE)
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(name for extra in ("chaos", "dev", "plot", "test") for name in extras[extra])]
    wanted += tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    names = {re.split(r"[\s<>=!~;\[]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    assert names - set(pins) - {DISTRIBUTION} == set()


@pytest.mark.slow
def test_public_names_exist() -> None:
    assert set(kvcached_dist.__all__) >= {
        "Config",
        "Coordinator",
        "DomainSpec",
        "PoolSpec",
        "StreamCoordinator",
        "World",
        "__version__",
    }
    assert [name for name in kvcached_dist.__all__ if not hasattr(kvcached_dist, name)] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_wheel_built_from_the_sdist_is_complete_and_works(tmp_path: Path) -> None:
    """The way a user gets it: no checkout, no link between folders, nothing of the build machine's environment."""
    build = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    with tarfile.open(tmp_path / made.stdout.split()[-1]) as sdist:
        sdist.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    expected = python_files(ROOT / "kvcached_dist") | {f"coord/{name}" for name in python_files(ROOT / "coord")}
    assert expected - python_files(source / "kvcached_dist") - python_files(source) == set()

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "-C", f"build-dir={tmp_path}/build", "-C", "cmake.build-type=Debug"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(
        [*pip, "wheel", "--quiet", *options, "-w", tmp_path, source], env=environment, check=True, timeout=300
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"kvcached_dist/{name}" for name in expected} - names == set()
    outside = {name.split("/")[0] for name in names} - {"kvcached_dist"}
    assert all(name.endswith(".dist-info") for name in outside), outside

    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", target, wheel], check=True, timeout=60)
    probe = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(target)!r}); "
            f"sys.path.append({str(Path(pytest.__file__).parents[1])!r})\n"
            + INSTALLED_PROBE.format(target=str(target)),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert probe.returncode == 0, probe.stderr
    assert probe.stdout.strip() == kvcached_dist.__version__

"""The documents hold what they say: links lead somewhere, commands and settings exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.lanes import LANES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"\b(?:ENABLE_KVCACHED|KVCACHED_[A-Z][A-Z_]*[A-Z])\b")


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchor(heading: str) -> str:
    """The fragment that a Markdown heading gets when it is shown."""
    text = re.sub(r"[`*_]|\[|\]\([^)]*\)", "", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    text = FENCE.sub("", path.read_text())
    return {anchor(heading) for heading in re.findall(r"^#{1,6} (.+)$", text, flags=re.MULTILINE)}


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    return broken


def commands(path: Path) -> list[str]:
    """The command lines of a page's code blocks: scripts of the checkout and the command line tool."""
    lines = [line.split("#")[0].strip() for block in FENCE.findall(path.read_text()) for line in block.splitlines()]
    return [line for line in lines if re.match(r"(\./)?scripts/|\.ci/run\b|(\.venv/bin/)?kvcached-dist\b", line)]


@cache
def tool_help(*subcommand: str) -> str:
    result = subprocess.run(
        [Path(sys.executable).with_name("kvcached-dist"), *subcommand, "--help"],
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One heading\n[a](absent.md) [b](#one-heading) [c](#other) [d](page.md) [e](https://example.org)\n"
    )
    assert broken_links(page) == ["absent.md", "#other"]


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
    assert set((ROOT / "docs").glob("*.md")) - {index} <= listed


def test_the_readme_shows_both_commands_first() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:15])
    assert "./scripts/run" in first_screen
    assert "./scripts/test" in first_screen


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_scripts_in_code_blocks_exist(path: Path) -> None:
    scripts = [line.split()[0] for line in commands(path) if "kvcached-dist" not in line.split()[0]]
    assert [name for name in scripts if not os.access(ROOT / name, os.X_OK)] == []


@pytest.mark.slow
def test_subcommands_and_options_in_the_readme_exist() -> None:
    lines = [
        re.sub(r"^\S*scripts/run\b", "kvcached-dist replay", line)
        for page in ("README.md", "CONTRIBUTING.md")
        for line in commands(ROOT / page)
    ]
    tool = [line.split()[1:] for line in lines if line.split()[0].endswith("kvcached-dist") and len(line.split()) > 1]
    assert {words[0] for words in tool} >= {"replay", "status"}
    for words in tool:
        assert re.search(rf"\b{words[0]}\b", tool_help()), words
        missing = [word for word in words if word.startswith("--") and word not in tool_help(words[0])]
        assert missing == [], words


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "docs" / "design.md"], ids=page_id)
def test_settings_that_a_page_names_exist(path: Path) -> None:
    from kvcached_dist.config import SETTINGS

    known = {setting.name for setting in SETTINGS.values()}
    assert set(SETTING.findall(path.read_text())) - known == set()


def test_the_lanes_table_is_the_table() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| ((?:`\w+`(?:, )?)+) \|", text, flags=re.MULTILINE))
    written = {name: tuple(re.findall(r"`(\w+)`", folders)) for name, folders in rows.items()}
    assert written == {lane.name: lane.folders for lane in LANES}

"""The tables of ``docs/settings.md``, made from the settings themselves.

``python -m kvcached_dist.settings_doc docs/settings.md`` rewrites both tables in place.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .config import DEFAULTS, PRESETS, SETTINGS
from .setting_kinds import shown


def settings_table() -> str:
    """The table of ``docs/settings.md``: one row per setting, Markdown."""
    rows = ["| name | default | unit | same on all ranks | meaning |", "|---|---|---|---|---|"]
    for attribute, setting in SETTINGS.items():
        world = "yes" if setting.world else ""
        rows.append(
            f"| `{setting.name}` | {shown(DEFAULTS[attribute])} | {setting.unit} | {world} "
            f"| {setting.meaning} Value: {setting.kind.rule}. |"
        )
    return "\n".join(rows) + "\n"


def presets_table() -> str:
    """The table of presets of ``docs/settings.md``, Markdown."""
    names = sorted({attr for preset in PRESETS.values() for attr in preset}, key=list(SETTINGS).index)
    rows = ["| name | " + " | ".join(PRESETS) + " |", "|---|" + "---|" * len(PRESETS)]
    for attribute in names:
        cells = (shown(preset.get(attribute, DEFAULTS[attribute])) for preset in PRESETS.values())
        rows.append(f"| `{SETTINGS[attribute].name}` | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def rewrite(text: str) -> str:
    """The document with both tables as they should be.

    Raises:
        ValueError: a marker comment is missing.
    """
    for name, table in (("settings", settings_table()), ("presets", presets_table())):
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        head, found_begin, rest = text.partition(begin)
        _, found_end, tail = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"the markers {begin.strip()!r} and {end!r} are missing")
        text = head + begin + table + end + tail
    return text


def main(path: str) -> None:
    """Rewrites one document in place."""
    document = Path(path)
    document.write_text(rewrite(document.read_text(encoding="utf-8")), encoding="utf-8")


__all__ = ["main", "presets_table", "rewrite", "settings_table"]

if __name__ == "__main__":
    main(sys.argv[1])

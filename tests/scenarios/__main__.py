"""``python -m tests.scenarios [--rewrite] [NAME]``: play the scenario files without a test runner."""

from __future__ import annotations

import logging
import sys

from .script import Scenario, scenarios


def main() -> int:
    """Exit status 0 when everything happens as it is written."""
    logging.disable(logging.CRITICAL)
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    status = 0
    for path in scenarios():
        if names and not any(name in path.name for name in names):
            continue
        scenario = Scenario.read(path)
        if "--rewrite" in sys.argv:
            path.write_text(scenario.text(scenario.play()))
        elif difference := scenario.difference():
            print(f"DIFFERS {difference}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

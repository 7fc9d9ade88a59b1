"""Process of the bootstrap store: a server and nothing else, so that it outlives any rank.

Reads the port from its first line of input, says ``ready PORT``, and ends with its input: it cannot outlive the
process that started it.
"""

from __future__ import annotations

import sys

from ..coord.links.store import connect_store
from .rank import LOOPBACK

START_S = 10.0


def main() -> int:
    """Serve. Returns the exit status."""
    print("warm", flush=True)
    line = sys.stdin.readline().strip()
    if not line:
        return 0
    server = connect_store(LOOPBACK, int(line), True, 1, START_S)
    print(f"ready {server.port}", flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())

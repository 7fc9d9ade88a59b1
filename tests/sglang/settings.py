"""The settings with which tests serve elastically: small granules and watermarks, so tiny pools move in many steps."""

from __future__ import annotations

from pathlib import Path

GRANULE = 4096

CAPACITY = 64 << 20
"""Of each rank's own memory: more than the tiny pools can use."""

CARD_CAPACITY = 2 << 20
"""Of the one card that all ranks share; the pools of the tiny Llama could use about half of it."""

CARD_UTILIZATION = 0.95

CARD_KEPT_FREE = CARD_CAPACITY // 20
"""Bytes that the utilization leaves unused."""


def elastic(*, capacity_bytes: int = CAPACITY, faults: str = "") -> dict[str, str]:
    """Environment of a server whose ranks have memory of their own.

    Args:
        capacity_bytes: what each rank has.
        faults: what to inject, as in ``--fault`` of the replay; empty: nothing.
    """
    settings = {
        "ENABLE_KVCACHED": "1",
        "KVCACHED_REQUIRE": "1",
        "KVCACHED_DIST_HOST_GRANULE_BYTES": str(GRANULE),
        "KVCACHED_DIST_HOST_CAPACITY_BYTES": str(capacity_bytes),
        "KVCACHED_MIN_RESERVED_PAGES": "1",
        "KVCACHED_MAX_RESERVED_PAGES": "2",
        "KVCACHED_DIST_BEAT_S": "0.1",
    }
    return settings | ({"KVCACHED_DIST_FAULTS": faults} if faults else {})


def on_one_card(folder: Path, *, faults: str = "") -> dict[str, str]:
    """Environment of a server whose ranks share one small card with whoever else opens :func:`card_file`.

    Args:
        folder: of the server, for what the ranks share.
        faults: what to inject; empty: nothing.
    """
    return {
        **elastic(capacity_bytes=CARD_CAPACITY, faults=faults),
        "KVCACHED_DIST_HOST_CARD_FILE": str(card_file(folder)),
        "KVCACHED_GPU_UTILIZATION": str(CARD_UTILIZATION),
        "KVCACHED_PHYSICAL_GROWTH_LOCK_DIR": str(folder),
    }


def card_file(folder: Path) -> Path:
    """The file that holds what is in use of the card."""
    return folder / "card"

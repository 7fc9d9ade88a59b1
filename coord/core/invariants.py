"""The safety and liveness rules by number, and :func:`require`, which checks them also under ``-O``."""

from __future__ import annotations

from .errors import InvariantViolation

RULES: dict[str, str] = {
    "S1": "no two ranks take different verdicts for one (epoch, txn)",
    "S2": "publish implies MAPPED from every rank of that epoch and txn",
    "S3": "a published page is mapped on every live rank in every pool it has",
    "S4": "no step touches an unmapped page; a page is unmapped only after the last step that may touch it",
    "S5": "the sequence (op, block ids) is equal on all ranks",
    "S6": "a page is in one state and owned by at most one transaction",
    "S7": "a grow is all or nothing over pools and ranks; after a refusal no handle of it is held",
    "S8": "nothing of an older epoch changes state",
    "S9": "duplicates change nothing and get the same answer",
    "S10": "at rest, handles held equal the extents of retained and published runs, per rank and pool",
    "S11": "no fallible driver call lies between a rank's last yes and publish",
    "S12": "log indices only grow; entries apply in order",
    "S13": "a published page holds its family's fill pattern",
    "S14": "the reserve that must stay free and the limits are never exceeded by our creates",
    "L1": "every call returns within its deadline",
    "L2": "every survivor learns of a dead rank within 1 s and of a hung one within lease + 1 s",
    "L3": "reservations of aborted transactions are released",
    "L4": "one dead link delays no other",
    "L5": "with memory everywhere and no faults every grow commits",
}
"""Every rule the design numbers. ``require`` refuses an id that is not here."""


def require(condition: bool, rule: str, detail: str) -> None:
    """Check a rule.

    Args:
        condition: what must hold.
        rule: id in :data:`RULES`.
        detail: what was found, for the person who reads the failure.

    Raises:
        InvariantViolation: the condition does not hold. The caller's state is not to be trusted any more.
        KeyError: the id is unknown.
    """
    if not condition:
        raise InvariantViolation(rule, f"{detail} (rule: {RULES[rule]})")

"""The rows of the complete run cover what they say they cover."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations, product

from tests.sglang.matrix import PREFILLS, ROWS, Row

FLAGS = (True, False)


def pairs(row: Row) -> set[tuple[str, object, str, object]]:
    values = {"topology": (row.tp, row.pp), **asdict(row)}
    del values["tp"], values["pp"]
    return {(a, values[a], b, values[b]) for a, b in combinations(values, 2)}


def test_the_rows_hold_every_pair_that_the_engine_can_serve() -> None:
    everything = [
        Row(tp, pp, page, radix, overlap, prefill, retract)
        for tp, pp, page, radix, overlap, prefill, retract in product(
            (1, 2), (1, 2), (1, 16, 64), FLAGS, FLAGS, PREFILLS, FLAGS
        )
        if pp == 1 or not overlap
    ]
    assert set().union(*map(pairs, everything)) - set().union(*map(pairs, ROWS)) == set()


def test_every_row_has_a_name_of_its_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)

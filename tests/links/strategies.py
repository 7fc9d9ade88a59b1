"""Hypothesis strategies for everything that travels on a link."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvcached_dist.coord.core.entries import Mark
from kvcached_dist.coord.core.messages import Message, TxnMessage
from kvcached_dist.coord.core.types import Cause, DomainId, PageId, Run, Txn
from kvcached_dist.coord.links.codec import KINDS
from kvcached_dist.coord.links.wire import ENTRIES
from tests.links.blank import EPOCH

SESSION = 0x1122334455667788

int64 = st.integers(-(1 << 63), (1 << 63) - 1)
unsigned64 = st.integers(0, (1 << 64) - 1)
runs = st.builds(
    Run,
    st.integers(0, 0xFFFF).map(DomainId),
    st.integers(0, (1 << 64) - 1).map(PageId),
    st.integers(1, (1 << 64) - 1),
)
causes = st.builds(Cause, rank=int64, detail=st.text(max_size=100))

# Numbers and texts take the range of their fields; everything else follows from the declared types.
st.register_type_strategy(int, int64)
st.register_type_strategy(str, st.text(max_size=200))
st.register_type_strategy(Run, runs)
st.register_type_strategy(Cause, causes)

entries = st.one_of(*(st.builds(record.kind) for record in ENTRIES.values()))
marks = st.builds(Mark, entries=st.lists(entries, max_size=8).map(tuple), digest=unsigned64)
st.register_type_strategy(Mark, marks)


def messages(kind: type[Message]) -> st.SearchStrategy[Any]:
    """Any message of this kind, of the epoch ``EPOCH``."""
    fixed: dict[str, Any] = {"epoch": st.just(EPOCH)}
    if issubclass(kind, TxnMessage):
        fixed["txn"] = unsigned64.map(Txn)
    return st.builds(kind, **fixed)


any_message = st.one_of(*(messages(kind) for kind in KINDS.values()))

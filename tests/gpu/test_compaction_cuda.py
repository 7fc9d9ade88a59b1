"""Moving what a prefix cache keeps, on a card: behind what the engine's batches have still to write, table in place."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.sglang import compaction, specs
from kvcached_dist.sglang.compaction import Compaction
from kvcached_dist.sglang.lists import TokenList

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

PAGE = 16
BLOCKS = {specs.FULL: 4000, specs.SWA: 1500}
WIDTHS = {specs.FULL: (37_440, 8_448, 1_168), specs.SWA: (149_760, 32_768)}
"""Bytes of a block in each lane: entries of DeepSeek-V4, of which some fill no granule, and its window and states."""
NODES, WITH_WINDOW = 60, 20


class Engine:
    """An allocator, a prefix cache and a scheduler of an engine, as far as moving asks for them."""

    def __init__(self) -> None:
        self.page_size = PAGE
        self.forward_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.session_controller = SimpleNamespace(maybe_reap=lambda *_, **__: None)
        self.lists = {name: TokenList(name, count + 1, 1, count) for name, count in BLOCKS.items()}
        choose = random.Random(5)
        self.used: dict[str, list[int]] = {}
        for name, known in self.lists.items():
            for first in range(0, BLOCKS[name], 100):
                known.publish(first, 100)
            known.bind(SimpleNamespace(free_pages=torch.zeros(0, dtype=torch.int64, device="cuda"), need_sort=False))
            self.used[name] = choose.sample(known.book.all_ids().tolist(), NODES if name == specs.FULL else WITH_WINDOW)
            rest = [block for block in known.free_ids().tolist() if block not in set(self.used[name])]
            known.replace(torch.tensor(rest, device="cuda"))
        self.nodes = [self._node(number) for number in range(NODES)]
        table = torch.zeros((BLOCKS[specs.FULL] + 1) * PAGE + 1, dtype=torch.int64, device="cuda")
        table[-1] = -1
        for full, window in self.nodes[:WITH_WINDOW]:
            table[full.value] = window.value
        inner = SimpleNamespace(free_group=None)
        self.allocator = SimpleNamespace(
            free_group=None, full_attn_allocator=inner, swa_attn_allocator=inner, full_to_swa_index_mapping=table
        )
        children = {
            number: SimpleNamespace(children={}, component_data={"full": full, "swa": window})
            for number, (full, window) in enumerate(self.nodes)
        }
        self.tree_cache = SimpleNamespace(
            tree_components=("full", "swa"), protected_size=lambda: 0, evictable_size=lambda: NODES * PAGE,
            token_to_kv_pool_allocator=self.allocator,
            tree_core=SimpleNamespace(root_node=SimpleNamespace(children=children)),
        )  # fmt: skip

    def is_fully_idle(self) -> bool:
        return True

    def _node(self, number: int) -> tuple[Any, Any]:
        values = {
            name: torch.arange(PAGE, device="cuda") + PAGE * used[number] if number < len(used) else None
            for name, used in self.used.items()
        }
        return SimpleNamespace(value=values[specs.FULL]), SimpleNamespace(value=values[specs.SWA])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(compaction, "unsupported", lambda *_, **__: "")
    return Engine()


def lanes() -> dict[str, list[torch.Tensor]]:
    return {
        name: [torch.zeros(BLOCKS[name], width, dtype=torch.uint8, device="cuda") for width in widths]
        for name, widths in WIDTHS.items()
    }


def blocks_of(value: torch.Tensor) -> int:
    first = int(value[0])
    assert torch.equal(value, torch.arange(PAGE, device=value.device) + first)
    return first // PAGE


def expected(number: int, lane: int, width: int, domain: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * domain + 100 * lane + number)
    return torch.randint(0, 256, (width,), dtype=torch.uint8, generator=made).to("cuda")


def test_what_batches_have_still_to_write_moves_and_the_table_follows_in_place(engine: Engine) -> None:
    pools, table = lanes(), engine.allocator.full_to_swa_index_mapping
    address = table.data_ptr()
    patterns = [
        (lane, engine.used[name][number], expected(number, at, lane.shape[1], domain))
        for domain, name in enumerate(pools)
        for at, lane in enumerate(pools[name])
        for number in range(len(engine.used[name]))
    ]
    torch.cuda.synchronize()
    with torch.cuda.stream(engine.forward_stream):
        # A fifth of a second, in which the last batch has written nothing yet.
        torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
        for lane, block, pattern in patterns:
            lane[block] = pattern
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record()
    made = Compaction(engine.lists, engine, pools, 1)
    assert not written.query()  # type: ignore[no-untyped-call]
    assert made.run() > 0
    torch.cuda.synchronize()
    for domain, name in enumerate(pools):
        for at, lane in enumerate(pools[name]):
            for number, pair in enumerate(engine.nodes[: len(engine.used[name])]):
                found = lane[blocks_of(pair[domain].value)]
                assert torch.equal(found, expected(number, at, lane.shape[1], domain)), (name, at, number)
        blocks = [blocks_of(pair[domain].value) for pair in engine.nodes[: len(engine.used[name])]]
        assert len({block // 100 for block in blocks}) <= 2
        everything = sorted([*blocks, *engine.lists[name].free_ids().tolist()])
        assert everything == engine.lists[name].book.all_ids().tolist()
    assert table.data_ptr() == address
    assert int(table[-1]) == -1
    assert int(table[:-1].count_nonzero()) == WITH_WINDOW * PAGE
    assert all(torch.equal(table[full.value], window.value) for full, window in engine.nodes[:WITH_WINDOW])


def test_a_run_that_was_left_is_confirmed_and_goes(engine: Engine) -> None:
    pools = lanes()
    assert Compaction(engine.lists, engine, pools, 1).run() > 0
    known = engine.lists[specs.FULL]
    torch.cuda.synchronize()
    firsts, counts = known.book.runs()
    known.run_is_free(int(firsts[-1]), int(counts[-1]))
    torch.cuda.synchronize()
    gone = [int(first) for first in firsts if known.run_is_free(int(first), 100)]
    assert len(gone) >= len(firsts) - 2
    known.retire(gone[-1], 100)
    torch.cuda.synchronize()
    known.verify()
    (check,) = known.take_checks()
    torch.cuda.synchronize()
    assert check.arrived()
    assert check.confirmed()

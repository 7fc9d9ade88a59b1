"""Stamps: a block that is not what it should be is found, in whatever pool, layer and end."""

from __future__ import annotations

import pytest
import torch

from kvcached_dist.pools import catalogue
from kvcached_dist.pools.specs import DomainSpec, FillPiece, PoolSpec, StageSpec
from kvcached_dist.replay import identity
from kvcached_dist.replay.sequence import Blocks
from kvcached_dist.replay.stamps import Stamps

MINUS_INFINITY = 0xFF800000


def stage_of(*pools: PoolSpec) -> StageSpec:
    domains = (DomainSpec("full", 16, 256), DomainSpec("rows", 8, 0))
    return StageSpec("test", "digest", 0, 1, 0, 2, domains, pools)


def tokens_pool(block_bytes: int = 64, name: str = "kv") -> PoolSpec:
    return PoolSpec(
        name, "full", block_bytes, (0, 1), (block_bytes,), fill_row_bytes=block_bytes, fill=(FillPiece(0, block_bytes),)
    )


def state_pool() -> PoolSpec:
    return PoolSpec(
        "state", "rows", 64, (0, 1), (4,), "float32", rows_per_block=4, fill_row_bytes=16,
        fill=(FillPiece(0, 8), FillPiece(8, 8, MINUS_INFINITY)),
    )  # fmt: skip


class Memory:
    """Plain tensors that hold every pool's fill pattern."""

    def __init__(self, *pools: PoolSpec, fill: bool = True) -> None:
        self.stage = stage_of(*pools)
        self.tensors: dict[str, torch.Tensor] = {}
        for pool in pools:
            tensor = torch.full((pool.buffers, self.stage.blocks(pool), pool.block_bytes), 0xAB, dtype=torch.uint8)
            if fill and pool.name == "state":
                pattern = torch.tensor([0.0, 0.0, float("-inf"), float("-inf")]).view(torch.uint8)
                tensor[:] = pattern.repeat(pool.block_bytes // 16)
            elif fill:
                tensor[:] = 0
            self.tensors[pool.name] = tensor
        views = {name: [tensor] for name, tensor in self.tensors.items()}
        self.stamps = Stamps(self.stage, views, {"full": 16, "rows": 8})
        self.stamps.published("full", 0, 16)
        self.stamps.published("rows", 0, 8)


def blocks(*ids: int, key: int = 5) -> Blocks:
    return Blocks(list(ids), [identity.stamp(key, index) for index in range(len(ids))])


def test_what_was_written_is_found_again() -> None:
    memory = Memory(tokens_pool(), tokens_pool(name="indexer"))
    memory.stamps.write("full", blocks(3, 1, 9))
    assert memory.stamps.verify("full", blocks(3, 1, 9), "free") == 0
    assert memory.stamps.totals.corrupt == 0
    # Three first uses and three frees.
    assert (memory.stamps.totals.written, memory.stamps.totals.verified) == (3, 6)


@pytest.mark.parametrize("pool", ["kv", "indexer"])
@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("byte", [0, 7, 56, 63])
def test_a_flipped_bit_at_either_end_of_any_pool_and_layer_is_found(pool: str, lane: int, byte: int) -> None:
    memory = Memory(tokens_pool(), tokens_pool(name="indexer"))
    memory.stamps.write("full", blocks(3, 4))
    memory.tensors[pool][lane, 4, byte] ^= 1
    assert memory.stamps.verify("full", blocks(3, 4), "free") == 1
    first = memory.stamps.totals.first[0]
    assert (first.pool, first.lane, first.block, first.when) == (pool, lane, 4, "free")
    assert "block 4 of full" in str(first)


def test_a_block_of_another_sequence_is_found() -> None:
    memory = Memory(tokens_pool())
    memory.stamps.write("full", blocks(3, key=5))
    memory.stamps.write("full", blocks(3, key=6))
    assert memory.stamps.verify("full", blocks(3, key=5), "prefix hit") == 1
    assert memory.stamps.verify("full", blocks(3, key=6), "free") == 0


def test_a_block_at_another_place_of_its_sequence_is_found() -> None:
    memory = Memory(tokens_pool())
    memory.stamps.write("full", blocks(3, 4))
    assert memory.stamps.verify("full", blocks(4, 3), "free") == 2


def test_a_layer_that_reads_its_neighbours_memory_is_found() -> None:
    memory = Memory(tokens_pool())
    memory.stamps.write("full", blocks(3))
    memory.tensors["kv"][1] = memory.tensors["kv"][0]
    assert memory.stamps.verify("full", blocks(3), "free") == 1


def test_a_fresh_block_that_does_not_hold_its_pattern_is_found() -> None:
    memory = Memory(tokens_pool())
    memory.tensors["kv"][0, 3, 60] = 1
    memory.stamps.write("full", blocks(3))
    assert memory.stamps.totals.corrupt == 1
    assert memory.stamps.totals.first[0].when == "first use"


def test_a_block_is_fresh_once_and_again_after_its_page_was_published_again() -> None:
    memory = Memory(tokens_pool())
    memory.stamps.write("full", blocks(3))
    memory.stamps.write("full", blocks(3))
    assert memory.stamps.totals.corrupt == 0
    memory.stamps.published("full", 3, 1)
    memory.stamps.write("full", blocks(3))
    assert memory.stamps.totals.corrupt == 1


def test_rows_are_reset_to_their_pattern_when_they_are_handed_out_again() -> None:
    memory = Memory(state_pool())
    memory.stamps.write("rows", blocks(2))
    memory.tensors["state"][:, 2, 16:32] = 0x55
    memory.stamps.write("rows", blocks(2, key=9))
    inside = memory.tensors["state"][:, 2].view(torch.float32).reshape(2, 4, 4)[:, 1]
    assert torch.equal(inside, torch.tensor([[0.0, 0.0, float("-inf"), float("-inf")]] * 2))
    assert memory.stamps.verify("rows", blocks(2, key=9), "free") == 0


def test_a_fresh_row_is_read_whole() -> None:
    memory = Memory(state_pool())
    memory.tensors["state"][1, 2, 30] ^= 1
    memory.stamps.write("rows", blocks(2))
    assert memory.stamps.totals.corrupt == 1


@pytest.mark.parametrize("block_bytes", [4, 8, 12, 24, 1728])
def test_blocks_of_any_word_size_can_be_stamped(block_bytes: int) -> None:
    memory = Memory(tokens_pool(block_bytes))
    memory.stamps.write("full", blocks(1, 2, 3))
    assert memory.stamps.verify("full", blocks(1, 2, 3), "free") == 0
    memory.tensors["kv"][1, 2, -1] ^= 0x80
    assert memory.stamps.verify("full", blocks(1, 2, 3), "free") == 1


def test_only_the_first_faulty_blocks_are_described() -> None:
    memory = Memory(tokens_pool())
    everything = blocks(*range(16))
    memory.stamps.write("full", everything)
    memory.tensors["kv"][:] = 0
    assert memory.stamps.verify("full", everything, "free") == 16
    assert len(memory.stamps.totals.first) == 16


def test_a_stage_without_layers_of_a_family_has_nothing_to_stamp() -> None:
    memory = Memory(tokens_pool())
    memory.stamps.write("rows", blocks(1))
    assert memory.stamps.verify("rows", blocks(1), "free") == 0


def test_patterns_of_the_catalogue_cover_their_rows() -> None:
    model = catalogue.get("tiny-dsv4").with_tokens(1 << 14)
    assert all(sum(piece.bytes for piece in pool.fill) == pool.fill_row_bytes for pool in model.pools)


def test_identities_differ_by_prefix_request_and_attempt() -> None:
    assert identity.prefix_keys((1, 2))[1] != identity.prefix_keys((2, 1))[1]
    assert identity.prefix_keys((1, 2, 3))[:2] == identity.prefix_keys((1, 2))
    keys = {identity.request_key(index, attempt) for index in range(50) for attempt in range(4)}
    assert len(keys) == 200
    assert identity.signed(1 << 63) == -(1 << 63)

"""What is in the blocks: every block that is written is stamped at both ends, in every pool and layer.

A stamp comes from :mod:`.identity`; each lane (layer, buffer, bank) turns it by a constant of its own, so a block
that reads another layer's memory, another sequence's tokens or a fresh page is found. Before the first use of a
block since its page was published, it must read as the family's fill pattern (S13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ..pools.specs import PoolSpec, StageSpec
from . import identity
from .sequence import Blocks

_WORDS: dict[int, torch.dtype] = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_REPORTED_MAX = 16
"""Faulty blocks that are described in full; the rest is only counted."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """One block that did not read as it must.

    Attributes:
        domain: id space.
        block: block id.
        pool: buffer family.
        lane: index of (layer, buffer) in the pool's bank.
        when: ``free``, ``prefix hit`` or ``first use``.
        expected: 64-bit word, or fewer bits for small blocks.
        found: the same.
    """

    domain: str
    block: int
    pool: str
    lane: int
    when: str
    expected: int
    found: int

    def __str__(self) -> str:
        return (
            f"{self.pool} lane {self.lane}, block {self.block} of {self.domain}, at {self.when}: "
            f"expected {self.expected:#018x}, found {self.found:#018x}"
        )


@dataclass(slots=True)
class _Lanes:
    """One pool as words: ``words[lane, block, word]``."""

    name: str
    words: torch.Tensor
    salts: torch.Tensor
    fill: torch.Tensor | None
    """The pattern of one block as words, or None when contents are left as they come."""


@dataclass(slots=True)
class StampTotals:
    """Counters of one rank. A block counts once, over all its pools and layers."""

    written: int = 0
    verified: int = 0
    corrupt: int = 0
    first: list[Corruption] = field(default_factory=list)


class Stamps:
    """Writes and checks stamps in the pools of one rank. Used by the scheduler thread only.

    Args:
        stage: the rank's pools.
        tensors: per pool with local layers and per bank, the bytes as a uint8 tensor
            ``[layers * buffers, blocks, block_bytes]`` with a contiguous last dimension.
        domain_blocks: blocks per domain.
        reset_domains: domains whose blocks are reset to the fill pattern when they are handed out again,
            as engines do with request rows and recurrent state.
    """

    def __init__(
        self,
        stage: StageSpec,
        tensors: Mapping[str, Sequence[torch.Tensor]],
        domain_blocks: Mapping[str, int],
        reset_domains: tuple[str, ...] = ("rows", "mamba"),
    ) -> None:
        self.totals = StampTotals()
        self._reset = reset_domains
        self._fresh = {name: np.zeros(blocks, dtype=np.bool_) for name, blocks in domain_blocks.items()}
        self._lanes: dict[str, list[_Lanes]] = {name: [] for name in domain_blocks}
        for number, pool in enumerate(stage.pools):
            for bank, tensor in enumerate(tensors.get(pool.name, ())):
                self._lanes[pool.domain].append(_lanes_of(number, bank, pool, tensor))

    def published(self, domain: str, first_block: int, count: int) -> None:
        """Note that these blocks hold their fill pattern now."""
        self._fresh[domain][first_block : first_block + count] = True

    def write(self, domain: str, blocks: Blocks) -> None:
        """Stamp blocks that were just handed out, after checking that fresh ones read as their pattern.

        Args:
            domain: id space of the blocks.
            blocks: ids and stamps, of equal length.
        """
        if not len(blocks):
            return
        ids = np.asarray(blocks.ids, dtype=np.int64)
        fresh = self._fresh[domain][ids]
        if fresh.any():
            self._check_fresh(domain, ids[fresh])
            self._fresh[domain][ids[fresh]] = False
        index = torch.from_numpy(ids)
        stamps = torch.tensor(blocks.stamps, dtype=torch.int64)
        for lanes in self._lanes[domain]:
            if domain in self._reset and lanes.fill is not None and not fresh.all():
                old = index[torch.from_numpy(~fresh)].to(lanes.words.device)
                lanes.words[:, old] = lanes.fill
            head = _expected(lanes, stamps)
            at = index.to(lanes.words.device)
            for word, value in _ends(lanes, head):
                lanes.words[:, at, word] = value
        self.totals.written += len(blocks)

    def verify(self, domain: str, blocks: Blocks, when: str) -> int:
        """Check that blocks still carry their stamps.

        Args:
            domain: id space of the blocks.
            blocks: ids and expected stamps.
            when: for the report, ``free`` or ``prefix hit``.

        Returns:
            How many do not.
        """
        if not len(blocks):
            return 0
        index = torch.tensor(blocks.ids, dtype=torch.int64)
        stamps = torch.tensor(blocks.stamps, dtype=torch.int64)
        wrong = np.zeros(len(blocks), dtype=np.bool_)
        for lanes in self._lanes[domain]:
            head = _expected(lanes, stamps)
            at = index.to(lanes.words.device)
            for word, expected in _ends(lanes, head):
                found = lanes.words[:, at, word]
                if not torch.equal(found, expected):
                    wrong |= self._report(domain, blocks.ids, lanes, when, expected, found)
        corrupt = int(wrong.sum())
        self.totals.verified += len(blocks)
        self.totals.corrupt += corrupt
        return corrupt

    def _check_fresh(self, domain: str, ids: npt.NDArray[np.int64]) -> None:
        wrong = np.zeros(len(ids), dtype=np.bool_)
        index = torch.from_numpy(ids)
        for lanes in self._lanes[domain]:
            if lanes.fill is None:
                continue
            at = index.to(lanes.words.device)
            # Rows are read whole; the blocks of token domains at both ends, where stamps will stand.
            words = slice(None) if domain in self._reset else slice(None, None, max(1, lanes.words.shape[2] - 1))
            found = lanes.words[:, at, words]
            expected = lanes.fill[words].expand_as(found)
            if not torch.equal(found, expected):
                wrong |= self._report(domain, ids.tolist(), lanes, "first use", expected, found)
        self.totals.verified += len(ids)
        self.totals.corrupt += int(wrong.sum())

    def _report(
        self,
        domain: str,
        ids: list[int],
        lanes: _Lanes,
        when: str,
        expected: torch.Tensor,
        found: torch.Tensor,
    ) -> npt.NDArray[np.bool_]:
        """Describe the first wrong words; returns which blocks are wrong in any lane."""
        differs = (found != expected).cpu()
        expected, found = expected.cpu(), found.cpu()
        for place in differs.nonzero()[: _REPORTED_MAX - len(self.totals.first)].tolist():
            self.totals.first.append(
                Corruption(
                    domain, ids[place[1]], lanes.name, place[0], when,
                    int(expected[tuple(place)]) & _mask(lanes), int(found[tuple(place)]) & _mask(lanes),
                )
            )  # fmt: skip
        other_dimensions = tuple(d for d in range(differs.dim()) if d != 1)
        result: npt.NDArray[np.bool_] = differs.sum(dim=other_dimensions).gt(0).numpy()
        return result


def _mask(lanes: _Lanes) -> int:
    return (1 << (8 * lanes.words.element_size())) - 1


def _expected(lanes: _Lanes, stamps: torch.Tensor) -> torch.Tensor:
    """Words ``[lanes, blocks]`` that the first word of each block must be."""
    wide = lanes.salts[:, None] ^ stamps.to(lanes.salts.device)[None, :]
    return wide if lanes.words.dtype is torch.int64 else _narrow(wide, lanes.words.dtype)


def _ends(lanes: _Lanes, head: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """(word, value) at both ends of a block; a block of one word has one end."""
    return [(0, head)] if lanes.words.shape[2] == 1 else [(0, head), (-1, ~head)]


def _narrow(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    return wide.contiguous().view(dtype).reshape(*wide.shape, 8 // size)[..., 0]


def _lanes_of(number: int, bank: int, pool: PoolSpec, tensor: torch.Tensor) -> _Lanes:
    if tensor.dtype is not torch.uint8 or tensor.dim() != 3 or tensor.stride(2) != 1:
        raise ValueError(f"pool {pool.name!r}: expected a uint8 tensor [lanes, blocks, bytes] with contiguous bytes")
    # The widest word that tiles the block and to which every lane and block is aligned.
    offsets = (tensor.shape[2], tensor.stride(0), tensor.stride(1), tensor.storage_offset(), tensor.data_ptr())
    size = next(size for size in _WORDS if all(offset % size == 0 for offset in offsets))
    words = tensor.view(_WORDS[size])
    salts = [identity.signed(identity.mix((number << 40) | (bank << 32) | lane)) for lane in range(tensor.shape[0])]
    return _Lanes(pool.name, words, torch.tensor(salts, dtype=torch.int64, device=tensor.device), _fill(pool, words))


def _fill(pool: PoolSpec, words: torch.Tensor) -> torch.Tensor | None:
    if not pool.fill or not pool.fill_row_bytes or pool.block_bytes % pool.fill_row_bytes:
        return None
    row = bytearray(pool.fill_row_bytes)
    covered = bytearray(pool.fill_row_bytes)
    for piece in pool.fill:
        row[piece.offset : piece.offset + piece.bytes] = piece.pattern.to_bytes(4, "little") * (piece.bytes // 4)
        covered[piece.offset : piece.offset + piece.bytes] = b"\1" * piece.bytes
    if not all(covered):
        return None
    block = bytes(row) * (pool.block_bytes // pool.fill_row_bytes)
    return torch.frombuffer(bytearray(block), dtype=words.dtype).to(words.device)


__all__ = ["Corruption", "StampTotals", "Stamps"]

"""Where the lanes of a pool lie inside its address reservation. Plain arithmetic, no driver.

Layer buffers follow one another at one constant stride. The stride is a whole number of granules, so
that layers share no border granule, except where a pool keeps sentinel rows: there the buffers are
packed, because the granule under a layer's sentinel then also holds page 0 of the next layer. Both
are always backed, and packing saves one granule per layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..coord.core.errors import ConfigError
from .specs import PoolSpec, StageSpec, align_up
from .validate import format_bytes

PACK_ALIGNMENT_BYTES = 4096
"""Packed buffers start on a multiple of this: more than any kernel's vector or copy descriptor asks for."""


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Addresses of one pool, as offsets into its reservation.

    Attributes:
        pool: local pool.
        domain: number of its domain.
        pages: pages of the domain.
        page_bytes: bytes of one page in one lane.
        buffer_stride: bytes from one layer buffer to the next.
        bank_stride: bytes from one bank to the next inside a buffer.
        reservation_bytes: address space to reserve; 0 without local layers.
        lanes: base offsets, ordered by layer, then buffer (K, V), then bank.
        pinned: ``(offset, bytes)`` that is always backed.
    """

    pool: PoolSpec
    domain: int
    pages: int
    page_bytes: int
    buffer_stride: int
    bank_stride: int
    reservation_bytes: int
    lanes: tuple[int, ...]
    pinned: tuple[tuple[int, int], ...]

    def spans(self, first: int, count: int) -> list[tuple[int, int]]:
        """Byte ranges ``(offset, bytes)`` of pages ``[first, first + count)``, one per lane."""
        return [(base + first * self.page_bytes, count * self.page_bytes) for base in self.lanes]


def pool_layout(pool: PoolSpec, domain: int, pages: int, blocks: int, granule_bytes: int) -> PoolLayout:
    """Place one pool.

    Args:
        pool: local pool.
        domain: number of its domain.
        pages: pages of the domain.
        blocks: blocks of the domain, the null block included.
        granule_bytes: mapping unit of the device.
    """
    page_bytes = pool.block_bytes * (blocks // pages)
    bank_stride = pool.rows(blocks) * pool.row_bytes
    alignment = min(PACK_ALIGNMENT_BYTES, granule_bytes) if pool.sentinel_rows else granule_bytes
    buffer_stride = align_up(bank_stride * pool.banks, alignment)
    lanes = tuple(
        buffer * buffer_stride + bank * bank_stride for buffer in range(pool.buffers) for bank in range(pool.banks)
    )
    sentinel_bytes = pool.sentinel_rows * pool.row_bytes
    pinned = tuple((base + bank_stride - sentinel_bytes, sentinel_bytes) for base in lanes if sentinel_bytes)
    reservation_bytes = align_up(pool.buffers * buffer_stride, granule_bytes)
    return PoolLayout(
        pool, domain, pages, page_bytes, buffer_stride, bank_stride, reservation_bytes, lanes, pinned
    )  # fmt: skip


def stage_layout(stage: StageSpec, granule_bytes: int) -> tuple[PoolLayout, ...]:
    """Place all pools of a stage.

    Args:
        stage: what this rank holds.
        granule_bytes: mapping unit of the device, a power of two of at least 4 KiB.

    Raises:
        ConfigError: the granule is none.
    """
    if granule_bytes < 4096 or granule_bytes & (granule_bytes - 1):
        raise ConfigError(f"granule_bytes={granule_bytes} must be a power of two of at least 4096")
    placed = []
    for pool in stage.pools:
        index = stage.domain_index(pool.domain)
        domain = stage.domains[index]
        placed.append(pool_layout(pool, index, domain.pages, domain.blocks, granule_bytes))
    return tuple(placed)


def granules_covered(spans: Iterable[tuple[int, int]], granule_bytes: int) -> int:
    """Number of distinct granules that byte ranges ``(offset, bytes)`` touch."""
    covered, end = 0, 0
    for offset, length in sorted(spans):
        first = max(offset // granule_bytes, end)
        last = -(-(offset + length) // granule_bytes)
        if last > first:
            covered += last - first
            end = last
    return covered


def runs_bytes(layout: PoolLayout, runs: Iterable[tuple[int, int, int]], granule_bytes: int) -> int:
    """Physical bytes of one pool that back exactly these runs: whole granules, shared ones once.

    Args:
        layout: the pool.
        runs: ``(domain, first page, pages)``; pinned rows count where a run holds page 0 of the domain.
        granule_bytes: mapping unit of the device.
    """
    spans: list[tuple[int, int]] = []
    for domain, first, count in runs:
        if domain == layout.domain:
            spans += layout.spans(first, count)
            spans += layout.pinned if first == 0 else ()
    return granules_covered(spans, granule_bytes) * granule_bytes


def minimum_bytes(stage: StageSpec, granule_bytes: int) -> int:
    """Physical bytes without which a rank can serve nothing: the null page and one more page of every domain.

    Args:
        stage: what this rank holds.
        granule_bytes: mapping unit of the device.
    """
    runs = [(index, 0, 2) for index in range(len(stage.domains))]
    return sum(runs_bytes(layout, runs, granule_bytes) for layout in stage_layout(stage, granule_bytes))


def check_capacity(stage: StageSpec, granule_bytes: int, capacity_bytes: int, rank: int) -> None:
    """Refuse a capacity in which a rank could serve nothing.

    Args:
        stage: what this rank holds.
        granule_bytes: mapping unit of the device.
        capacity_bytes: physical memory that this rank may use.
        rank: world rank, for the message.

    Raises:
        ConfigError: names the capacity, what the rank needs, and the minimum.
    """
    needed = minimum_bytes(stage, granule_bytes)
    if capacity_bytes < needed:
        raise ConfigError(
            f"capacity {format_bytes(capacity_bytes)} is too small for rank {rank}: the null page and one page of each"
            f" domain ({', '.join(d.name for d in stage.domains)}) need {format_bytes(needed)} there; the minimum is"
            f" {format_bytes(needed)}"
        )

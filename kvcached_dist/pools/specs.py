"""What a model keeps per token, per request and per layer: pools, domains, stages.

A spec is data. It says how many bytes a block has, which layers own one, which ids index it and what
a fresh block must contain; nothing here depends on the name of a model. Specs hold no addresses:
:mod:`.layout` places them, :mod:`.backing` backs them.

Words: a *block* is what the engine addresses with one id of a domain, a *row* is one entry along the
leading dimension of the engine's own buffer (a token, a state slot, or a whole padded token page), a
*lane* is one such buffer: ``(layer, buffer, bank)``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod

from ..coord.core.errors import ConfigError
from . import validate
from .dtypes import DTYPE_BYTES


def align_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class FillPiece:
    """One stretch of the pattern that a fresh fill row holds.

    Attributes:
        offset: first byte inside the fill row, a multiple of 4.
        bytes: length, a multiple of 4.
        pattern: 32-bit word that is repeated.
    """

    offset: int
    bytes: int
    pattern: int = 0


@dataclass(frozen=True, slots=True)
class RowRule:
    """How many rows the engine's own buffer has: ``align(per_block * (blocks - 1) + extra)``.

    Engines size buffers from usable blocks (the null block not counted) and add padding of their own;
    views of the native shape have to repeat that arithmetic.

    Attributes:
        per_block: rows per usable block.
        extra: rows on top: the null block's, sentinels, padding.
        align: the sum is rounded up to a multiple of it.
    """

    per_block: int
    extra: int
    align: int = 1

    def rows(self, blocks: int) -> int:
        """Rows of one bank of a domain with ``blocks`` blocks, the null block included."""
        return align_up(self.per_block * (blocks - 1) + self.extra, self.align)


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One KV buffer family on a rank: equal buffers for a set of layers.

    Attributes:
        name: ``swa_kv``, ``c4_kv``, ``mha_kv``, ... unique in a model.
        domain: name of the id space that indexes it.
        block_bytes: bytes of one block in one lane.
        layers: model layers that own a buffer, ascending. Draft stages count on after the last layer.
        row_shape: shape of one row of the native buffer.
        dtype: torch name of the native element type.
        rows_per_block: rows of one block.
        buffers_per_layer: 2 where K and V are separate buffers of equal geometry.
        ratio: tokens that share one compressed entry.
        banks: copies at a constant stride inside a buffer; each has its own tail.
        sentinel_rows: rows at the end of every bank that are always backed (index -1 of the engine).
        native_rows: the engine's own size of a bank; None: the blocks and the sentinels, nothing else.
        ring_rows: for state kept as a ring per scheduler page, the length of the ring; 0: no ring.
        fill_row_bytes: length of the pattern that repeats through a block.
        fill: the pattern of a fresh block; empty: contents are left as they come.
        budget_bytes: what the engine's own sizing charges per block and lane; 0: ``block_bytes``.
        draft: belongs to a draft (MTP) model, which the engine hosts on the last stage.
    """

    name: str
    domain: str
    block_bytes: int
    layers: tuple[int, ...]
    row_shape: tuple[int, ...]
    dtype: str = "uint8"
    rows_per_block: int = 1
    buffers_per_layer: int = 1
    ratio: int = 1
    banks: int = 1
    sentinel_rows: int = 0
    native_rows: RowRule | None = None
    ring_rows: int = 0
    fill_row_bytes: int = 0
    fill: tuple[FillPiece, ...] = ()
    budget_bytes: int = 0
    draft: bool = False

    def __post_init__(self) -> None:
        validate.check_pool(self)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.row_shape) * DTYPE_BYTES[self.dtype]

    @property
    def charged_bytes(self) -> int:
        """What the engine's sizing charges per block and lane (it leaves page padding out)."""
        return self.budget_bytes or self.block_bytes

    @property
    def buffers(self) -> int:
        """Buffers on this stage: layers times buffers per layer."""
        return len(self.layers) * self.buffers_per_layer

    @property
    def lanes(self) -> int:
        """Byte ranges that one block occupies on this stage: buffers times banks."""
        return self.buffers * self.banks

    def rows(self, blocks: int) -> int:
        """Rows of one bank of the native buffer.

        Args:
            blocks: blocks of the domain, the null block included.
        """
        if self.native_rows is None:
            return blocks * self.rows_per_block + self.sentinel_rows
        return self.native_rows.rows(blocks)

    def buffer_bytes(self, blocks: int) -> int:
        """Bytes of one native buffer: all rows of all banks."""
        return self.rows(blocks) * self.row_bytes * self.banks

    def native_shape(self, blocks: int) -> tuple[int, ...]:
        """Shape of the engine's own buffer of one layer, in elements of ``dtype``."""
        return (self.rows(blocks) * self.banks, *self.row_shape)

    def native_strides(self) -> tuple[int, ...]:
        """Strides of that buffer in elements; native buffers are contiguous."""
        inner = [prod(self.row_shape[i + 1 :]) for i in range(len(self.row_shape))]
        return (prod(self.row_shape), *inner)

    def static_bytes(self, blocks: int) -> int:
        """Bytes that the native engine allocates for this pool on this stage."""
        return self.buffers * self.buffer_bytes(blocks)


@dataclass(frozen=True, slots=True)
class DomainSpec:
    """An id space that indexes a set of pools.

    Attributes:
        name: ``full``, ``swa``, ``rows``, ``mamba``.
        blocks: logical capacity in blocks, the null block (id 0) included; a multiple of ``blocks_per_page``.
        block_tokens: tokens of one block; 0 where a block is a request row or a state slot.
        blocks_per_page: B, blocks that are granted together; a power of two.
        window_tokens: sliding window that a pool of this domain serves; 0: none.
    """

    name: str
    blocks: int
    block_tokens: int
    blocks_per_page: int = 1
    window_tokens: int = 0

    def __post_init__(self) -> None:
        validate.check_domain(self)

    @property
    def pages(self) -> int:
        """Pages that the leader can grant, page 0 (with the null block) included."""
        return self.blocks // self.blocks_per_page

    @property
    def tokens(self) -> int:
        """Usable tokens, or usable rows where a block holds no tokens."""
        return (self.blocks - 1) * max(self.block_tokens, 1)


def layer_range(num_layers: int, pp_rank: int, pp_size: int, partition: Sequence[int] | None = None) -> tuple[int, int]:
    """Layers ``[first, end)`` of a pipeline stage, cut the way the engine cuts them.

    Stages are contiguous; where the division leaves a rest, the *last* stages get one layer more.

    Args:
        num_layers: layers of the target model.
        pp_rank: stage.
        pp_size: number of stages.
        partition: layers per stage where the operator fixed them; ignored for one stage, as in SGLang.

    Raises:
        ConfigError: the stage does not exist or the partition does not add up.

    Source: SGLang 0.5.20, ``get_pp_indices``.
    """
    if pp_size < 1 or not 0 <= pp_rank < pp_size:
        raise ConfigError(f"pipeline stage {pp_rank} of {pp_size} does not exist; stages are 0..pp_size-1")
    if partition is not None and pp_size > 1:
        if len(partition) != pp_size or sum(partition) != num_layers or min(partition) < 0:
            raise ConfigError(
                f"layer partition {list(partition)} must name {pp_size} stages and add up to {num_layers} layers"
            )
        first = sum(partition[:pp_rank])
        return first, first + partition[pp_rank]
    base, rest = divmod(num_layers, pp_size)
    longer_before = max(0, pp_rank - (pp_size - rest))
    first = pp_rank * base + longer_before
    return first, first + base + (1 if pp_rank >= pp_size - rest else 0)


def local_pools(
    pools: Sequence[PoolSpec], num_layers: int, pp_rank: int, pp_size: int, partition: Sequence[int] | None = None
) -> tuple[PoolSpec, ...]:
    """Pools with the layers of one stage only; order and number of pools are kept.

    Args:
        pools: pools with all layers.
        num_layers: layers of the target model.
        pp_rank: stage.
        pp_size: number of stages.
        partition: layers per stage where the operator fixed them.

    Raises:
        ConfigError: the stage does not exist.

    Source: SGLang 0.5.20 builds draft pools on the last stage only (its draft group has one stage).
    """
    first, end = layer_range(num_layers, pp_rank, pp_size, partition)
    last = pp_rank == pp_size - 1

    def local(pool: PoolSpec) -> tuple[int, ...]:
        if pool.draft:
            return pool.layers if last else ()
        return tuple(layer for layer in pool.layers if first <= layer < end)

    return tuple(replace(pool, layers=local(pool)) for pool in pools)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What one pipeline stage holds: the model's domains and pools, with the local layers only.

    Attributes:
        name: name of the model.
        model_digest: digest of the whole model; equal on every rank of a world.
        pp_rank: this stage.
        pp_size: number of stages.
        first_layer: first target layer of the stage.
        end_layer: one past its last target layer.
        domains: all domains, in the model's order; the position is the domain's number on the wire.
        pools: all pools, in the model's order; ``layers=()`` where the stage has none.
    """

    name: str
    model_digest: str
    pp_rank: int
    pp_size: int
    first_layer: int
    end_layer: int
    domains: tuple[DomainSpec, ...]
    pools: tuple[PoolSpec, ...]

    def digest(self) -> str:
        """Digest of the whole model: compare it between ranks before anything is mapped."""
        return self.model_digest

    def domain_index(self, name: str) -> int:
        """Number of a domain.

        Raises:
            ConfigError: no domain has this name.
        """
        for index, domain in enumerate(self.domains):
            if domain.name == name:
                return index
        raise ConfigError(f"no domain {name!r} in {self.name}; it has {[d.name for d in self.domains]}")

    def domain(self, name: str) -> DomainSpec:
        """The domain of this name."""
        return self.domains[self.domain_index(name)]

    def pool_index(self, name: str) -> int:
        """Number of a pool.

        Raises:
            ConfigError: no pool has this name.
        """
        for index, pool in enumerate(self.pools):
            if pool.name == name:
                return index
        raise ConfigError(f"no pool {name!r} in {self.name}; it has {[p.name for p in self.pools]}")

    def pool(self, name: str) -> PoolSpec:
        """The pool of this name."""
        return self.pools[self.pool_index(name)]

    def blocks(self, pool: PoolSpec) -> int:
        """Blocks of the domain that indexes ``pool``."""
        return self.domain(pool.domain).blocks

    def page_bytes(self, domain: str) -> int:
        """Bytes that one page of a domain occupies over all local pools and layers."""
        per_page = self.domain(domain).blocks_per_page
        return sum(p.lanes * p.block_bytes * per_page for p in self.pools if p.domain == domain)

    def static_bytes(self) -> int:
        """Bytes that the native engine would allocate on this stage for the same sizes."""
        return sum(p.static_bytes(self.blocks(p)) for p in self.pools)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All pools of a model with all layers, and its domains with their sizes; equal on every rank.

    Attributes:
        name: name of the model.
        num_layers: layers of the target model.
        domains: id spaces.
        pools: buffer families over all layers.
        draft_layers: draft (MTP) stages, numbered on from ``num_layers``.
        tp_size: tensor-parallel size that the byte counts are for.
    """

    name: str
    num_layers: int
    domains: tuple[DomainSpec, ...]
    pools: tuple[PoolSpec, ...]
    draft_layers: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        validate.check_model(self)

    def digest(self) -> str:
        """SHA-256 over everything in the spec, as hexadecimal digits.

        Equal on all ranks of a world; differs as soon as any byte count, layer, size or pattern does.
        """
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def stage(self, pp_rank: int, pp_size: int, partition: Sequence[int] | None = None) -> StageSpec:
        """The part of one pipeline stage.

        Args:
            pp_rank: stage.
            pp_size: number of stages.
            partition: layers per stage where the operator fixed them.

        Returns:
            Every domain and every pool in the same order; a pool without local layers stays, with zero bytes.
            Draft pools belong to the last stage.

        Raises:
            ConfigError: the stage does not exist.
        """
        return self._stage(self.digest(), pp_rank, pp_size, partition)

    def stages(self, pp_size: int, partition: Sequence[int] | None = None) -> tuple[StageSpec, ...]:
        """All stages of a pipeline, in order."""
        digest = self.digest()
        return tuple(self._stage(digest, rank, pp_size, partition) for rank in range(pp_size))

    def _stage(self, digest: str, pp_rank: int, pp_size: int, partition: Sequence[int] | None) -> StageSpec:
        first, end = layer_range(self.num_layers, pp_rank, pp_size, partition)
        pools = local_pools(self.pools, self.num_layers, pp_rank, pp_size, partition)
        return StageSpec(self.name, digest, pp_rank, pp_size, first, end, self.domains, pools)

"""Views of a reservation: bytes of a pool, and buffers of the engine's own shape. No copies.

A view covers reserved addresses, not memory: reading or writing a page that is not mapped is an access
violation, as intended. Making a view touches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ..coord.core.errors import ConfigError
from .dtypes import DTYPE_BYTES
from .layout import PoolLayout


def pool_bytes(storage: torch.Tensor, layout: PoolLayout, blocks: int, bank: int = 0) -> torch.Tensor:
    """All blocks of a pool as bytes.

    Args:
        storage: uint8, 1-D, the whole reservation.
        layout: where the pool's lanes lie.
        blocks: blocks of the domain.
        bank: which bank of every buffer.

    Returns:
        uint8 ``[layers * buffers, blocks, block_bytes]``.
    """
    pool = layout.pool
    if not 0 <= bank < pool.banks:
        raise ConfigError(f"pool {pool.name!r}: bank {bank} does not exist; it has {pool.banks}")
    return storage.as_strided(
        (pool.buffers, blocks, pool.block_bytes),
        (layout.buffer_stride, pool.block_bytes, 1),
        bank * layout.bank_stride,
    )


def buffer_view(
    storage: torch.Tensor,
    layout: PoolLayout,
    index: int,
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """One layer buffer in a given element type, shape and strides.

    Args:
        storage: uint8, 1-D, the whole reservation.
        layout: where the pool's lanes lie.
        index: ``local layer * buffers_per_layer + buffer``.
        dtype: torch name of the element type.
        shape: shape in elements.
        strides: strides in elements, not negative.

    Raises:
        ConfigError: the buffer does not exist here, or the view would leave it.
    """
    pool = layout.pool
    if not 0 <= index < pool.buffers:
        raise ConfigError(f"pool {pool.name!r}: buffer {index} does not exist on this stage; it has {pool.buffers}")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"pool {pool.name!r}: dtype {dtype!r} is unknown; use one of {', '.join(DTYPE_BYTES)}")
    if len(shape) != len(strides) or min(shape, default=0) < 0 or min(strides, default=0) < 0:
        raise ConfigError(f"pool {pool.name!r}: shape {tuple(shape)} and strides {tuple(strides)} do not go together")
    item = DTYPE_BYTES[dtype]
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if prod(shape) else 0
    buffer_bytes = layout.bank_stride * pool.banks
    if reach * item > buffer_bytes:
        raise ConfigError(
            f"pool {pool.name!r}: a view of shape {tuple(shape)}, strides {tuple(strides)}, {dtype} reaches"
            f" {reach * item} bytes, the buffer has {buffer_bytes}"
        )
    start = index * layout.buffer_stride
    usable = buffer_bytes // item * item
    elements = storage[start : start + usable].view(getattr(torch, dtype))
    return elements.as_strided(tuple(shape), tuple(strides), elements.storage_offset())


def stacked_view(storage: torch.Tensor, layout: PoolLayout, blocks: int, buffer: int = 0) -> torch.Tensor:
    """One native buffer of every local layer as a single tensor, for engines that allocate layers together.

    Args:
        storage: uint8, 1-D, the whole reservation.
        layout: where the pool's lanes lie.
        blocks: blocks of the domain.
        buffer: which buffer of a layer.

    Returns:
        ``[layers, *native_shape]`` of the native element type. Contiguous inside a layer; the step from layer to
        layer is that of the reservation.

    Raises:
        ConfigError: the layers have no such buffer.
    """
    pool = layout.pool
    if not 0 <= buffer < pool.buffers_per_layer:
        raise ConfigError(f"pool {pool.name!r}: buffer {buffer} does not exist; a layer has {pool.buffers_per_layer}")
    item = DTYPE_BYTES[pool.dtype]
    step = layout.buffer_stride // item
    shape = (len(pool.layers), *pool.native_shape(blocks))
    strides = (step * pool.buffers_per_layer, *pool.native_strides())
    return storage.view(getattr(torch, pool.dtype)).as_strided(shape, strides, buffer * step)

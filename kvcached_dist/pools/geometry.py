"""From placed pools to the plain data that the native backing works on."""

from __future__ import annotations

from .. import _native
from .layout import PoolLayout


def geometry_of(layout: PoolLayout) -> _native.PoolGeometry:
    """One pool as native geometry; a pool without local layers has no lanes and no addresses."""
    pool = layout.pool
    local = bool(layout.lanes)
    return _native.PoolGeometry(
        name=pool.name,
        domain=layout.domain,
        pages=layout.pages,
        reservation_bytes=layout.reservation_bytes,
        lanes=[(base, layout.page_bytes) for base in layout.lanes],
        pinned=list(layout.pinned),
        fill=[(piece.offset, piece.bytes, piece.pattern) for piece in pool.fill] if local else [],
        fill_row_bytes=pool.fill_row_bytes if local else 0,
    )

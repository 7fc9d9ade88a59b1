"""Element types of buffers, by their torch names; kept apart so that specs need no torch."""

from __future__ import annotations

DTYPE_BYTES: dict[str, int] = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
}
"""Bytes per element."""

NEGATIVE_INFINITY: dict[str, int] = {
    "bfloat16": 0xFF80FF80,
    "float16": 0xFC00FC00,
    "float32": 0xFF800000,
}
"""Negative infinity as a 32-bit fill word; two elements per word for 16-bit types."""

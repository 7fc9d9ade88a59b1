"""What a block should contain, as one 64-bit number.

A stamp is a function of whose tokens a block holds (a prefix of hash ids, or one attempt of one request) and of
the block's index in that sequence. It does not depend on the block's id, so a block that two sequences own by
mistake, or that lost its memory, does not read as expected.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_REQUEST = 0x5851F42D4C957F2D


def mix(value: int) -> int:
    """A bijection of 64-bit numbers that spreads every bit (the finaliser of splitmix64)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def signed(value: int) -> int:
    """The same 64 bits as a signed number, as torch and numpy hold them."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def prefix_keys(hash_ids: tuple[int, ...]) -> list[int]:
    """Identity of each prefix: element k stands for ``hash_ids[: k + 1]``."""
    keys = []
    key = 0
    for hash_id in hash_ids:
        key = mix(key ^ mix(hash_id))
        keys.append(key)
    return keys


def request_key(index: int, attempt: int) -> int:
    """Identity of what one attempt of a request writes that no other request can share."""
    return mix(_REQUEST ^ mix(index) ^ (attempt << 1))


def stamp(key: int, index: int) -> int:
    """Expected content of block ``index`` of the sequence ``key``, as a signed 64-bit number."""
    return signed(mix(key + index * _GOLDEN))


__all__ = ["mix", "prefix_keys", "request_key", "signed", "stamp"]

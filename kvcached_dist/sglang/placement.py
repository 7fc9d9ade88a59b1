"""Where the ids that a prefix cache holds should lie so that the fewest stay published."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from .book import PageBook
from .census import Ids

LEAST_SHARE = 16
"""What is moved must free at least one in so many of the ids that the cache holds."""


@dataclass(frozen=True, slots=True)
class Move:
    """Ids that change places.

    Attributes:
        sources: ids that are left, ascending.
        targets: where each of them goes, ascending; none of them was in use.
        free: all free ids afterwards, in the order in which they are given.
    """

    sources: Ids
    targets: Ids
    free: Ids


def plan(book: PageBook, used: Ids) -> Move | None:
    """Where ids in use should lie so that the fewest stay published.

    The runs that are filled are those that have the fewest ids of all that have enough together. Runs that hold
    something already are filled instead where that keeps about as little, because less moves.

    Args:
        book: what is published, and in which runs.
        used: ids in use, each once, in any order.

    Returns:
        The same for equal arguments, on every rank; ``None``: it would not free enough. ``None`` also for what this
        has made, unless new runs were published or ids freed.
    """
    used = np.sort(used)
    firsts, counts = book.runs()
    sizes = np.array([book.ids_of(int(first), int(count)).size for first, count in zip(firsts, counts, strict=True)])
    held = np.bincount(_run_of(firsts, used, book), minlength=len(firsts))
    worth = max(1, -(-used.size // LEAST_SHARE))
    if int(sizes[(held > 0) | (firsts == 0)].sum()) - used.size < worth:
        return None  # nearly always: not even the best runs would free enough
    least = _least(firsts, sizes, held, used.size, book.blocks_per_page)
    chosen = _held_first(firsts, sizes, held, used.size)
    if sizes[chosen].sum() >= sizes[least].sum() + worth:
        chosen = least
    kept = np.zeros(len(firsts), dtype=np.bool_)
    kept[chosen] = True
    gain = int(sizes[(held > 0) & ~kept].sum() - sizes[(held == 0) & kept & (firsts > 0)].sum())
    if gain < worth:
        return None
    filled = np.concatenate([book.ids_of(int(firsts[run]), int(counts[run])) for run in chosen])[: used.size]
    filled.sort()
    rest = np.setdiff1d(book.all_ids(), filled, assume_unique=True)
    # What the next request takes should not lie in runs that are about to go.
    stays = kept[_run_of(firsts, rest, book)]
    return Move(
        np.setdiff1d(used, filled, assume_unique=True),
        np.setdiff1d(filled, used, assume_unique=True),
        np.concatenate((rest[stays], rest[~stays])),
    )


def _least(firsts: Ids, sizes: Ids, held: Ids, used: int, per_page: int) -> list[int]:
    """Runs with the fewest ids of all that have so many; of equal lengths those that hold most, the last one least."""
    runs = sorted(range(len(firsts)), key=lambda run: (-held[run], firsts[run]))
    # The run of the null block never goes, so it is filled in any case. The last page of the domain may have fewer ids
    # than a page: its run is looked at with and without. All other runs are whole pages.
    null = [run for run in runs if not firsts[run]]
    odd = [run for run in runs if firsts[run] and sizes[run] % per_page]
    whole = [run for run in runs if run not in (*null, *odd)]
    found = []
    for begin in (null, [*null, *odd]):
        pages = _fewest(whole, sizes[whole] // per_page, -(-(used - int(sizes[begin].sum())) // per_page))
        if pages is not None:
            found.append([*begin, *pages])
    return min(found, key=lambda chosen: int(sizes[chosen].sum()))


def _fewest(runs: list[int], lengths: Ids, wanted: int) -> list[int] | None:
    """Of these runs those that together are the fewest pages that suffice; ``None``: all of them do not.

    Few lengths differ, so all sums up to a little more than what is wanted are found at once, as the bits of a number.
    """
    if wanted <= 0:
        return []
    if lengths.sum() < wanted:
        return None
    of_length: dict[int, list[int]] = defaultdict(list)
    for run, length in zip(runs, lengths.tolist(), strict=True):
        of_length[length].append(run)
    # So many of a length, by powers of two: with a few parts for each length every number can be had.
    parts = [(length, some) for length in sorted(of_length) for some in _parts(len(of_length[length]))]
    below = (1 << wanted + max(of_length)) - 1
    sums, before = 1, []
    for length, some in parts:
        before.append(sums)
        sums |= (sums << length * some) & below
    left = wanted + ((sums >> wanted) & -(sums >> wanted)).bit_length() - 1
    chosen: set[int] = set()
    for (length, some), without in zip(reversed(parts), reversed(before), strict=True):
        if length * some <= left and without >> left - length * some & 1:
            chosen.update(of_length[length][:some])
            del of_length[length][:some]
            left -= length * some
    return [run for run in runs if run in chosen]


def _parts(count: int) -> list[int]:
    """Numbers of which some add up to each number up to this one, and no more."""
    parts = []
    while count:
        parts.append(-(-count // 2))
        count -= parts[-1]
    return parts


def _held_first(firsts: Ids, sizes: Ids, held: Ids, used: int) -> list[int]:
    """Runs that so many ids fill, those that hold something first, then long ones, the last one perhaps in part."""
    order = sorted(
        range(len(firsts)), key=lambda run: (firsts[run] > 0, not held[run], -sizes[run], -held[run], firsts[run])
    )
    chosen: list[int] = []
    for run in order:
        if used and (sizes[run] <= used or not firsts[run]):
            chosen.append(run)
            used -= min(used, int(sizes[run]))
    if not used:
        return chosen
    left = set(order) - set(chosen)
    return [*chosen, min(left, key=lambda run: (sizes[run], -held[run], firsts[run]))]


def _run_of(firsts: Ids, ids: Ids, book: PageBook) -> Ids:
    return np.searchsorted(firsts, ids // book.blocks_per_page, side="right") - 1


__all__ = ["Move", "plan"]

"""A free list whose order matters: hands out from the front, takes back at the end, as SGLang's allocators do."""

from __future__ import annotations

from collections.abc import Sequence


class ListPool:
    """Blocks of one domain on one rank; implements ``coord.core.replica.FreeList``.

    Args:
        pages: logical capacity in pages.
        blocks_per_page: blocks of one page.
        ordered: hand out the lowest ids instead of those that were freed first.
    """

    def __init__(self, pages: int, blocks_per_page: int, *, ordered: bool) -> None:
        self.pages = pages
        self.blocks_per_page = blocks_per_page
        self._ordered = ordered
        self._free: list[int] = []
        self._free_of_page = [-1] * pages
        """Free blocks of a page; -1 where it is not published."""

    def available(self) -> int:
        """Blocks that an allocation could take now."""
        return len(self._free)

    def publish(self, first_page: int, count: int) -> None:
        """Add pages, all of their blocks free."""
        size = self.blocks_per_page
        for page in range(first_page, first_page + count):
            if self._free_of_page[page] >= 0:
                raise ValueError(f"page {page} is published twice")
            self._free_of_page[page] = size
        self._free.extend(range(first_page * size, (first_page + count) * size))

    def retire(self, first_page: int, count: int) -> None:
        """Remove pages that are entirely free."""
        if not self.run_is_free(first_page, count):
            raise ValueError(f"pages [{first_page}, {first_page + count}) are not entirely free")
        size = self.blocks_per_page
        low, high = first_page * size, (first_page + count) * size
        self._free = [block for block in self._free if not low <= block < high]
        self._free_of_page[first_page : first_page + count] = [-1] * count

    def run_is_free(self, first_page: int, count: int) -> bool:
        """Whether every block of these pages is published and free."""
        return all(free == self.blocks_per_page for free in self._free_of_page[first_page : first_page + count])

    def sort(self) -> None:
        """Low ids first."""
        self._free.sort()

    def alloc(self, blocks: int) -> tuple[int, ...]:
        """Take blocks; the caller has seen that there are enough."""
        if self._ordered:
            self._free.sort()
        taken, self._free = tuple(self._free[:blocks]), self._free[blocks:]
        if len(taken) != blocks:
            raise ValueError(f"{blocks} blocks wanted, {len(taken)} are free")
        for block in taken:
            self._free_of_page[block // self.blocks_per_page] -= 1
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        for block in blocks:
            self._free_of_page[block // self.blocks_per_page] += 1
        self._free.extend(blocks)

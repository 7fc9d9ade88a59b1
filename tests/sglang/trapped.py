"""A real server with the disturbances of ``standins/traps.py``, and what its ranks wrote down."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcached_dist import _native
from tests.sglang.models import LLAMA_OPTIONS, write_llama
from tests.sglang.server import Server, eventually
from tests.sglang.settings import CARD_CAPACITY, CARD_KEPT_FREE, GRANULE, card_file, on_one_card


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the record.

    Attributes:
        at: time in seconds.
        pid: process.
        what: kind.
        numbers: what belongs to it.
    """

    at: float
    pid: int
    what: str
    numbers: tuple[int, ...]


@dataclass
class Trapped:
    """The server and its folder."""

    server: Server
    folder: Path

    def events(self, *kinds: str) -> list[Event]:
        """What has happened so far, of these kinds, in the order of time."""
        path = self.folder / "events"
        found = []
        for line in path.read_text().splitlines() if path.exists() else ():
            at, pid, what, *numbers = line.split(" ")
            if what in kinds:
                found.append(Event(float(at), int(pid), what, tuple(int(number) for number in numbers if number)))
        return sorted(found, key=lambda event: event.at)

    def entries(self) -> list[list[tuple[str, int]]]:
        """Log entries with their transactions as each rank applied them, in rank order."""
        kinds = ("Publish", "Retire", "Unretire", "Reclaimed", "Sort", "Evict", "Growable")
        of_rank: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for event in self.events(*kinds):
            rank, txn = event.numbers
            of_rank[rank].append((event.what, txn))
        return [of_rank[rank] for rank in sorted(of_rank)]

    def shrink(self) -> None:
        """Flush, and wait until just the reserve is held."""
        self.server.flush()

        def small() -> bool:
            full = self.server.states()[0]["domains"]["full"]
            return bool(full["published"] <= 4 * full["blocks_per_page"])

        eventually(small, self.server.states)

    def order(self, name: str, text: str) -> Path:
        """Put this file with all of its text into the folder: who looks in between finds no file, not an empty one."""
        path = self.folder / name
        new = path.with_suffix(".new")
        new.write_text(text)
        return new.rename(path)

    @contextlib.contextmanager
    def switched(self, name: str, seconds: float | None = None) -> Iterator[None]:
        """A disturbance is on inside, where it takes a length with this one."""
        path = self.order(name, "" if seconds is None else str(seconds))
        try:
            yield
        finally:
            path.unlink()

    def limit(self, limit_bytes: int) -> None:
        """The leader orders this limit of memory per rank; 0: none. Returns when it has done so."""
        path = self.order("limit", str(limit_bytes))
        eventually(lambda: not path.exists(), self.server.states)

    @contextlib.contextmanager
    def neighbour(self, leaves_bytes: int) -> Iterator[None]:
        """Something else on the card takes all but ``leaves_bytes`` of what may be used; gone at the end."""
        card = _native.HostDevice(CARD_CAPACITY, GRANULE, card_file=str(card_file(self.folder)))
        geometry = _native.PoolGeometry(
            name="neighbour", domain=0, pages=512, reservation_bytes=512 * GRANULE, lanes=[(0, GRANULE)], pinned=[],
            fill=[], fill_row_bytes=0,
        )  # fmt: skip
        backing = _native.Backing(card, [geometry])
        try:
            pages = (card.free_bytes() - CARD_KEPT_FREE - leaves_bytes) // GRANULE
            assert pages > 0, "the engine holds so much already that nothing is left to take"
            assert backing.reserve(1, [(0, 0, pages)]).ok
            yield
        finally:
            backing.close()


@contextlib.contextmanager
def trapped(*, tp: int, pp: int, options: Sequence[str]) -> Iterator[Trapped]:
    """Serve the tiny Llama with small granules and watermarks on one small card."""
    # Not pytest's own folder: snapshots need a file system that can make unnamed files.
    folder = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    # Short runs: what happens in the middle of a prompt needs growth there, and not all of it at the beginning.
    short = {"KVCACHED_DIST_RUN_PAGES_MAX": "1", "KVCACHED_DIST_RUN_SHARE": "0"}
    settings = {**on_one_card(folder), **short, "TRAPS": str(folder)}
    try:
        server = Server.start(
            write_llama(folder, layers=max(2, pp)),
            folder,
            tp=tp,
            pp=pp,
            options=(*LLAMA_OPTIONS, *options),
            settings=settings,
        )
        try:
            yield Trapped(server, folder)
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)

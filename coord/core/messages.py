"""Messages on the links between the leader and each follower.

Each link is FIFO in both directions. Every message carries the epoch of its link; those of a
transaction carry its number. ``coord.links.codec`` gives them their bytes.

======================  =========  ==============================================================
message                 direction  meaning
======================  =========  ==============================================================
Reserve                 L -> F     take the physical handles of these runs; touch no address
Reserved / Refused      F -> L     the vote
Abort                   L -> F     give back what this transaction created
Map                     L -> F     map, set access, fill, prepare publishing
Mapped / MapFailed      F -> L
Drained                 F -> L     work launched before the retirement has finished here
Unmap                   L -> F     take the mapping away, keep the handles
Unmapped / UnmapFailed  F -> L
Restore                 L -> F     map the runs of a failed reclaim again
Restored/RestoreFailed  F -> L
Release                 L -> F     release the handles (idempotent, may be repeated)
Released/ReleaseFailed  F -> L
Query / State           both       read-only: what became of a transaction
MarkMessage             L -> F     a mark, for engines without an ordered stream of their own
Hello                   F -> L     a rank introduces itself (start or rejoin)
Snapshot / Joined       both       an emptied rank takes the state; physical resolution of an epoch
Beat                    both       liveness; carries free memory
Fail                    L -> F     the coordinator has failed; first cause
Reform                  L -> F     a follower was lost; meet again in the next epoch
Bye                     both       an orderly close
======================  =========  ==============================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from .entries import Mark
from .types import Cause, Epoch, Run, Txn, TxnPhase


@dataclass(frozen=True, slots=True)
class Message:
    """Common part: the epoch of the link."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class TxnMessage(Message):
    """A message of one transaction."""

    txn: Txn


@dataclass(frozen=True, slots=True)
class Reserve(TxnMessage):
    """Take the physical handles of these runs; touch no address."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Reserved(TxnMessage):
    """Carries ``handles``: physical handles held now, per pool of the world's list (S10)."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused(TxnMessage):
    """The vote is no; this rank has given everything back."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Abort(TxnMessage):
    """Give back what this transaction created."""


@dataclass(frozen=True, slots=True)
class Map(TxnMessage):
    """Map, set access, fill and prepare publishing."""


@dataclass(frozen=True, slots=True)
class Mapped(TxnMessage):
    """Everything of this transaction is mapped here."""


@dataclass(frozen=True, slots=True)
class MapFailed(TxnMessage):
    """Some of it could not be mapped; what is mapped stays mapped."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Drained(TxnMessage):
    """Carries ``lag_steps``: how many engine steps the leader's marks were ahead at the RETIRE."""

    lag_steps: int


@dataclass(frozen=True, slots=True)
class Unmap(TxnMessage):
    """Take the mapping away, keep the handles."""


@dataclass(frozen=True, slots=True)
class Unmapped(TxnMessage):
    """Nothing of this transaction is mapped here any more."""


@dataclass(frozen=True, slots=True)
class UnmapFailed(TxnMessage):
    """A part could not be unmapped."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Restore(TxnMessage):
    """Map the runs of a failed reclaim again, and fill them."""


@dataclass(frozen=True, slots=True)
class Restored(TxnMessage):
    """The runs are mapped as before the reclaim."""


@dataclass(frozen=True, slots=True)
class RestoreFailed(TxnMessage):
    """They are not; the mapping of this rank cannot be shown."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Release(TxnMessage):
    """Release the handles; idempotent."""


@dataclass(frozen=True, slots=True)
class Released(TxnMessage):
    """Carries ``handles``: physical handles held now, per pool of the world's list (S10)."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseFailed(TxnMessage):
    """The driver refused to release a handle, which stays in the count."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Query(TxnMessage):
    """Read-only. Carries ``number``: counts the queries of this transaction to this rank; the reply repeats it."""

    number: int


@dataclass(frozen=True, slots=True)
class State(TxnMessage):
    """The reply to a query."""

    number: int
    phase: TxnPhase
    cause: Cause | None
    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MarkMessage(Message):
    """A mark, for engines without an ordered stream of their own."""

    mark: Mark


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """A rank introduces itself on a new link.

    Attributes:
        spec_digest: digest of the world-wide pool specification (equal on all ranks).
        config_digest: digest of the settings that must be equal on all ranks.
        domain_blocks: blocks that this rank could address, per domain.
        page_bytes: physical bytes of one page on this rank over all its pools and layers, per domain.
        device: physical device id (PCI bus id, or the name of a host card).
        pid: operating-system process id, for messages to people.
        total_bytes: physical memory of the device.
        free_bytes: free physical memory now.
    """

    spec_digest: str
    config_digest: str
    domain_blocks: tuple[int, ...]
    page_bytes: tuple[int, ...]
    device: str
    pid: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotRun:
    """One run of a snapshot: ``published`` ones are mapped again, others resolved by rule M2."""

    run: Run
    published: bool


@dataclass(frozen=True, slots=True)
class Snapshot(Message):
    """The leader's state for a joining rank.

    Attributes:
        domain_blocks: blocks per domain, the minimum over ranks.
        runs: runs that hold memory, published or retained.
        quarantined: runs out of use for good.
        next_index: log index from which the joining rank executes its stream.
        limit_revision: revision of the limit in force.
        limit_bytes: limit in force (0: none).
    """

    domain_blocks: tuple[int, ...]
    runs: tuple[SnapshotRun, ...]
    quarantined: tuple[Run, ...]
    next_index: int
    limit_revision: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Joined(Message):
    """Carries ``handles``: handles held per pool after the snapshot was processed (S10)."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Beat(Message):
    """A sign of life, with what the leader needs for its decisions.

    Attributes:
        free_bytes: bytes this rank could still create above its reserve and below its limit.
        held_bytes: physical bytes that this rank holds.
        handles: physical handles held, per pool.
        step: last engine step done.
        quiet_txn: the newest transaction whose messages this rank has processed, if no driver call of it is
            queued or running, else 0. Only then do ``handles`` count for S10.
    """

    free_bytes: int
    held_bytes: int
    handles: tuple[int, ...]
    step: int
    quiet_txn: Txn


@dataclass(frozen=True, slots=True)
class Fail(Message):
    """The coordinator has failed; the first cause."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Reform(Message):
    """This epoch ends because a follower was lost; the survivors meet again in the next one."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """An orderly close."""


ANSWERS = (
    Reserved,
    Refused,
    Mapped,
    MapFailed,
    Drained,
    Unmapped,
    UnmapFailed,
    Restored,
    RestoreFailed,
    Released,
    ReleaseFailed,
)
"""Messages that answer one request of a transaction."""

"""What a fault is: one line of text per fault, so that command lines, scenarios and reports name it alike.

::

    rank=1,op=create,nth=37,count=2          the 37th and 38th create on rank 1 fail
    rank=1,op=slow,call=map,ms=50,nth=3      the 3rd map on rank 1 takes 50 ms longer
    rank=0,op=slow,at=mapped,ms=200          rank 0 answers MAPPED 200 ms late
    rank=2,op=kill,at=reserved               rank 2 is killed before it answers RESERVED
    rank=1,op=hang,at=drained,seconds=3      the whole process stands still for 3 s
    rank=1,op=drop,message=RESERVED          the first RESERVED of rank 1 is never sent

``nth`` counts from :meth:`Injector.arm`, starting with 1; ``count`` is how many in a row from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from .coord.core import messages
from .coord.core.errors import ConfigError

DRIVER_CALLS: Final = ("create", "map", "access", "fill", "unmap", "release")
"""Driver calls that can be made to fail or to take longer."""

POINTS: Final = (
    "reserve", "reserved", "map", "mapped", "publish", "retire", "drained", "unmap", "unmapped", "release",
)  # fmt: skip
"""Moments of a rank: a request has arrived, or its answer is about to be sent, or an entry was applied."""

_EXAMPLES: Final[Mapping[str, str]] = {
    **{call: f"rank=1,op={call},nth=37" for call in DRIVER_CALLS},
    "kill": "rank=2,op=kill,at=reserved",
    "hang": "rank=1,op=hang,at=mapped,seconds=3",
    "drop": "rank=1,op=drop,message=RESERVED,nth=1",
    "slow": "rank=1,op=slow,call=create,ms=50",
}
_COUNT_MAX = 1_000_000_000


def _message_names() -> frozenset[str]:
    """Names of the messages as logs show them: ``MapFailed`` is ``MAP_FAILED``."""
    names: set[str] = set()
    pending: list[type[messages.Message]] = [messages.Message]
    while pending:
        children = pending.pop().__subclasses__()
        pending.extend(children)
        names.update(child.__name__.removesuffix("Message") for child in children)
    names.discard("Txn")
    return frozenset("".join("_" + c if c.isupper() and i else c for i, c in enumerate(n)).upper() for n in names)


MESSAGES: Final = _message_names()
"""Messages that a rank can fail to send."""


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One fault.

    Attributes:
        rank: world rank where it happens.
        op: a driver call that fails, or ``kill``, ``hang``, ``drop`` or ``slow``.
        nth: first occurrence that is hit, counted from arming, 1-based.
        count: how many in a row.
        at: moment, for ``kill``, ``hang`` and ``slow``.
        seconds: how long a ``hang`` lasts.
        message: for ``drop``.
        call: driver call, for ``slow``.
        ms: delay of ``slow`` in milliseconds.
    """

    rank: int
    op: str
    nth: int = 1
    count: int = 1
    at: str = ""
    seconds: float = 0.0
    message: str = ""
    call: str = ""
    ms: float = 0.0

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """Reads one fault.

        Raises:
            ConfigError: names the value and a fault that would work.
        """
        return _Parser(text).spec()

    def __str__(self) -> str:
        parts = [f"rank={self.rank}", f"op={self.op}"]
        for key in ("at", "call", "message"):
            if getattr(self, key):
                parts.append(f"{key}={getattr(self, key)}")
        if self.op == "hang":
            parts.append(f"seconds={self.seconds:g}")
        if self.op == "slow":
            parts.append(f"ms={self.ms:g}")
        parts.append(f"nth={self.nth}")
        if self.count != 1:
            parts.append(f"count={self.count}")
        return ",".join(parts)

    def hits(self, occurrence: int) -> bool:
        """Whether the occurrence with this number (1-based) is hit."""
        return self.nth <= occurrence < self.nth + self.count


class _Parser:
    """Reads one fault; every refusal names what was wrong and a fault of the same kind that works."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._values: dict[str, str] = {}

    def spec(self) -> FaultSpec:
        for part in self._text.split(","):
            key, separator, value = (piece.strip() for piece in part.partition("="))
            if not separator or not key or not value:
                raise self._error(f"{part.strip()!r} is not key=value")
            if key in self._values:
                raise self._error(f"{key} is given twice")
            self._values[key] = value
        op = self._choice("op", tuple(_EXAMPLES))
        self._refuse_foreign_keys(op)
        return FaultSpec(
            rank=int(self._number("rank", least=0, whole=True)),
            op=op,
            nth=int(self._number("nth", least=1, whole=True, default=1)),
            count=int(self._number("count", least=1, whole=True, default=1)),
            at=self._choice("at", POINTS) if self._has_point(op) else "",
            seconds=self._number("seconds", least=0.001, most=3600) if op == "hang" else 0.0,
            message=self._choice("message", tuple(sorted(MESSAGES))) if op == "drop" else "",
            call=self._choice("call", DRIVER_CALLS) if op == "slow" and "at" not in self._values else "",
            ms=self._number("ms", least=0.001, most=3_600_000) if op == "slow" else 0.0,
        )

    def _has_point(self, op: str) -> bool:
        return op in ("kill", "hang") or (op == "slow" and "at" in self._values)

    def _refuse_foreign_keys(self, op: str) -> None:
        keys = {"kill": {"at"}, "hang": {"at", "seconds"}, "drop": {"message", "count"},
                "slow": {"call", "at", "ms", "count"}}.get(op, {"count"})  # fmt: skip
        known = {"rank", "op", "nth"} | keys
        for key in self._values:
            if key not in known:
                raise self._error(f"op={op} has no {key}")
        if "call" in self._values and "at" in self._values:
            raise self._error("call and at exclude one another")

    def _choice(self, key: str, words: tuple[str, ...]) -> str:
        value = self._required(key)
        if value not in words:
            raise self._error(f"{key}={value} is not one of {', '.join(words)}")
        return value

    def _number(
        self, key: str, *, least: float, most: float = _COUNT_MAX, whole: bool = False, default: float | None = None
    ) -> float:
        if default is not None and key not in self._values:
            return default
        text = self._required(key)
        kind = "a whole number" if whole else "a number"
        try:
            number = float(int(text) if whole else text)
        except (ValueError, OverflowError):
            raise self._error(f"{key}={text} is not {kind}") from None
        if not least <= number <= most:
            raise self._error(f"{key}={text} is not from {least:g} to {most:g}")
        return number

    def _required(self, key: str) -> str:
        if key not in self._values:
            raise self._error(f"{key} is missing")
        return self._values[key]

    def _error(self, what: str) -> ConfigError:
        example = _EXAMPLES.get(self._values.get("op", ""), _EXAMPLES["create"])
        shown = self._text.encode("unicode_escape").decode("ascii")[:200]
        return ConfigError(f"fault {shown!r}: {what}; for example {example}")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All faults of a run, for all ranks.

    Attributes:
        specs: the faults, armed when a coordinator has started.
        open: more faults may follow while it runs (:meth:`Injector.rearm`); without faults it may be left out.
    """

    specs: tuple[FaultSpec, ...] = ()
    open: bool = False

    @classmethod
    def parse(cls, texts: Iterable[str], world_size: int | None = None) -> FaultPlan:
        """Reads a plan.

        Args:
            texts: one fault each.
            world_size: number of ranks, when it is known.

        Raises:
            ConfigError: an unusable fault, or a rank outside of the world.
        """
        specs = tuple(FaultSpec.parse(text) for text in texts)
        for spec in specs:
            if world_size is not None and spec.rank >= world_size:
                raise ConfigError(
                    f"fault {str(spec)!r}: rank={spec.rank} is not in a world of {world_size};"
                    f" for example rank={world_size - 1}"
                )
        return cls(specs)

    def for_rank(self, rank: int) -> tuple[FaultSpec, ...]:
        """The faults of one rank."""
        return tuple(spec for spec in self.specs if spec.rank == rank)

    def __bool__(self) -> bool:
        return bool(self.specs)


__all__ = ["DRIVER_CALLS", "MESSAGES", "POINTS", "FaultPlan", "FaultSpec"]

"""Who is who: the ranks of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class World:
    """Tensor- and pipeline-parallel ranks of one engine, seen from one of them.

    Attributes:
        rank: world rank of this process, ``pp_rank * tp + tp_rank``; rank 0 is the leader.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.

    Raises:
        ConfigError: a size below 1, or a rank outside the world.
    """

    rank: int = 0
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("pp", self.pp)):
            if value < 1:
                raise ConfigError(f"{name}={value}: a parallel size is at least 1, for example {name}=1")
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank={self.rank}: a world of tp={self.tp} x pp={self.pp} has ranks 0 to {self.size - 1}"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp

    @property
    def tp_rank(self) -> int:
        """Position among the tensor-parallel ranks of the stage."""
        return self.rank % self.tp

    @property
    def pp_rank(self) -> int:
        """Pipeline stage."""
        return self.rank // self.tp

    def describe(self, rank: int) -> str:
        """A rank in words, for errors."""
        return f"rank {rank} (pp={rank // self.tp}, tp={rank % self.tp})"

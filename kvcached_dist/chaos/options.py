"""Options of a chaos run, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Config
from ..errors import ConfigError
from ..pools import catalogue
from ..pools.specs import ModelSpec

MODEL = "tiny-dsv4"
WORLD_MAX = 16
FAULTS_MAX = 100_000

MODEL_BYTES = 64 << 20
"""Capacity for which the model's id spaces are sized."""

CARD_BYTES = 160 << 20
"""Memory of the card of a rank: enough for a stopped rank and for the one that takes its place."""

LIMIT_BYTES = 20 << 20
"""Most that a rank may hold; a little less than the workload would take, so that misses happen without faults."""

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Options of one run.

    Attributes:
        tp: tensor-parallel ranks per stage.
        pp: pipeline stages.
        faults: how many faults.
        seed: of the plan and of the workload.
        address: Ray cluster to use; empty: a local instance for this run.
        granule_bytes: mapping granule of the host backend.
        lease_s: a rank that is silent for this long is lost.
    """

    tp: int = 2
    pp: int = 2
    faults: int = 200
    seed: int = 1
    address: str = ""
    granule_bytes: int = 64 << 10
    lease_s: float = 5.0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp

    @property
    def growth_deadline_s(self) -> float:
        """Deadline of a growth: that of the replay, and short enough for a short lease.

        A follower waits a lease for the leader's verdict, and the leader a deadline and two queries for its answers.
        """
        return min(2.0, (0.4 if self.lease_s >= 5 else 0.25) * self.lease_s)

    @property
    def call_bound_s(self) -> float:
        """Longest time that any call of a coordinator may take on a rank that is not stopped itself (L1)."""
        verdict_s = self.growth_deadline_s + 2 * min(1.0, self.growth_deadline_s)
        return max(self.lease_s, verdict_s) + 1.0

    @property
    def wave_bound_s(self) -> float:
        """Longest time that a wave of the workload may take (L5): a few calls that take as long as they may."""
        return 6 * self.call_bound_s + 30

    def validate(self) -> None:
        """Check everything.

        Raises:
            ConfigError: names the option, the value, and what would work.
        """
        for name, size in (("--tp", self.tp), ("--pp", self.pp)):
            if size < 1:
                raise ConfigError(f"{name} {size}: must be at least 1, for example {name} 2")
        if not 2 <= self.world_size <= WORLD_MAX:
            raise ConfigError(
                f"--tp {self.tp} --pp {self.pp}: {self.world_size} ranks, but faults between ranks need 2 to"
                f" {WORLD_MAX}; for example --tp 2 --pp 2"
            )
        layers = self.plan_layers()
        if self.pp > layers:
            raise ConfigError(f"--pp {self.pp}: the model {MODEL} has {layers} layers; for example --pp 2")
        if not 1 <= self.faults <= FAULTS_MAX:
            raise ConfigError(f"--faults {self.faults}: must be from 1 to {FAULTS_MAX}, for example --faults 200")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: must be 0 or more, for example --seed 1")
        if not 0.5 <= self.lease_s <= 60:
            raise ConfigError(f"--lease {self.lease_s:g}: must be from 0.5 to 60 seconds, for example --lease 5")
        if self.granule_bytes > 2 << 20:
            raise ConfigError(f"--granule {self.granule_bytes}: must be at most 2 MiB, for example --granule 64K")
        self.config("/tmp")
        self.model_spec()

    @staticmethod
    def plan_layers() -> int:
        """Layers of the model, the most stages that it can have."""
        return catalogue.get(MODEL).num_layers

    def config(self, run_dir: str) -> Config:
        """Settings of the ranks: the proportions of the replay's timing, everything of the run in one directory.

        Args:
            run_dir: directory of snapshots, locks and the journal on the ranks' host.
        """
        return Config.preset(
            "replay",
            beat_s=self.lease_s / 20,
            growth_deadline_s=self.growth_deadline_s,
            lease_s=self.lease_s,
            drain_deadline_s=0.5 * self.lease_s,
            start_timeout_s=START_TIMEOUT_S,
            ipc_timeout_s=2 * self.lease_s + 2,
            host_granule_bytes=self.granule_bytes,
            host_capacity_bytes=CARD_BYTES,
            physical_limit_bytes=LIMIT_BYTES,
            min_reserved_pages=0,
            max_reserved_pages=2,
            run_pages_max=4,
            on_rank_lost="rejoin",
            seed=self.seed,
            state_dir=run_dir,
            physical_growth_lock_dir=run_dir,
            fault_journal=f"{run_dir}/faults.jsonl",
        )

    def model_spec(self) -> ModelSpec:
        """The model that all ranks serve."""
        return catalogue.get(MODEL).with_capacity(MODEL_BYTES, self.pp, granule_bytes=self.granule_bytes)


__all__ = ["CARD_BYTES", "FAULTS_MAX", "MODEL", "START_TIMEOUT_S", "WORLD_MAX", "ChaosOptions"]

"""What the operator asked for, checked before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import _native
from ..config import Config
from ..errors import ConfigError
from ..fault_specs import FaultPlan
from ..pools import catalogue
from ..pools.specs import ModelSpec
from . import traces
from .prefix_cache import CacheShape
from .sequence import Shape
from .workload import Request

GIB = 1 << 30

BACKENDS = ("host", "cuda")
LAUNCHERS = ("spawn", "torchrun")
MAX_WORLD = 64

MAX_REQUESTS = 256
"""Most request rows of a model that keeps state by row."""

MIN_REQUESTS = 4
"""Fewest of them, however small the capacity."""

ROWS_SHARE = 0.25
"""Part of the capacity that request rows may take; the rest holds tokens."""

PROBE_TOKENS = 1 << 16
"""Size of the model that is only made to ask for bytes per row."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of ``kvcached-dist replay``; plain data, the same on every rank.

    Attributes:
        trace: file, or ``synthetic``.
        model: name in the catalogue.
        tp: tensor-parallel size.
        pp: pipeline stages.
        backend: ``host`` or ``cuda``.
        capacity_bytes: physical bytes per rank.
        requests: how many requests of the trace; None for all.
        speed: virtual seconds per wall-clock second; None for as fast as possible.
        faults: fault specs as text.
        cached_tokens: bound of the prefix cache; None takes the setting.
        launcher: ``spawn`` or ``torchrun``.
        granule_bytes: mapping unit of the host backend; None takes the setting.
        lease_s: None takes the setting.
        seed: of the generated trace and of every random choice.
    """

    trace: str = traces.SYNTHETIC
    model: str = "deepseek-v4-flash"
    tp: int = 2
    pp: int = 2
    backend: str = "host"
    capacity_bytes: int = 2 * GIB
    requests: int | None = None
    speed: float | None = None
    faults: tuple[str, ...] = ()
    cached_tokens: int | None = None
    launcher: str = "spawn"
    granule_bytes: int | None = None
    lease_s: float | None = None
    seed: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp

    def validate(self) -> None:
        """Check everything that can be known before processes start.

        Raises:
            ConfigError: names the option, the value, and what would work.

        Blocks: for reading the trace.
        """
        for name, size in (("--tp", self.tp), ("--pp", self.pp)):
            if size < 1:
                raise ConfigError(f"{name} {size}: must be at least 1, for example {name} 2")
        if self.world_size > MAX_WORLD:
            raise ConfigError(
                f"--tp {self.tp} --pp {self.pp}: {self.world_size} ranks, at most {MAX_WORLD} are supported"
            )
        _one_of("--backend", self.backend, BACKENDS)
        _one_of("--launcher", self.launcher, LAUNCHERS)
        if self.speed is not None and not 0 < self.speed < float("inf"):
            raise ConfigError(f"--speed {self.speed}: must be greater than 0, for example --speed 10")
        if self.cached_tokens is not None and self.cached_tokens < 0:
            raise ConfigError(f"--cached-tokens {self.cached_tokens}: must be 0 or more, for example 200000")
        try:
            FaultPlan.parse(self.faults, self.world_size)
        except ConfigError as error:
            raise ConfigError(f"--fault: {error}") from error
        self.config()
        if self.backend == "cuda":
            usable, reason = _native.cuda_available()
            if not usable:
                raise ConfigError(f"--backend cuda: {reason}; use --backend host on a machine without a GPU")
        self.model_spec()
        self.load()

    def config(self) -> Config:
        """Settings of the run: options win over the environment, the environment over the replay preset.

        Raises:
            ConfigError: a setting is unusable.
        """
        config = Config.from_env(None, preset="replay")
        config = config.override(host_capacity_bytes=max(self.capacity_bytes, config.host_granule_bytes))
        if self.lease_s is not None:
            # A short lease implies short deadlines; only a setting that contradicts it is refused.
            shorter = {
                "lease_s": self.lease_s,
                "growth_deadline_s": min(config.growth_deadline_s, 0.4 * self.lease_s),
                "beat_s": min(config.beat_s, 0.1 * self.lease_s),
            }
            config = _overridden(config, "--lease", self.lease_s, shorter)
        if self.granule_bytes is not None:
            config = _overridden(config, "--granule", self.granule_bytes, {"host_granule_bytes": self.granule_bytes})
        if self.cached_tokens is not None:
            config = config.override(max_cached_tokens=self.cached_tokens)
        if self.seed:
            config = _overridden(config, "--seed", self.seed, {"seed": self.seed})
        return config

    def model_spec(self, granule_bytes: int | None = None) -> ModelSpec:
        """The model, sized for the capacity as the native engine would size it.

        Args:
            granule_bytes: of the device; None takes the setting of the host backend.

        Raises:
            ConfigError: unknown model, or a capacity in which a rank could serve nothing.
        """
        if granule_bytes is None:
            granule_bytes = self.config().host_granule_bytes if self.backend == "host" else 2 << 20
        chosen: dict[str, int] = {"tp_size": self.tp}
        if "max_requests" in catalogue.options(self.model):
            chosen["max_requests"] = self._max_requests()
        plan = catalogue.get(self.model, **chosen)
        try:
            return plan.with_capacity(self.capacity_bytes, self.pp, granule_bytes=granule_bytes)
        except ConfigError as error:
            raise ConfigError(f"--capacity {self.capacity_bytes}: {error}") from error

    def _max_requests(self) -> int:
        """Request rows: as many as fit a quarter of the capacity, as an operator would size a small rank."""
        probe = catalogue.get(self.model, tp_size=self.tp, max_requests=1).with_tokens(PROBE_TOKENS)
        row_bytes = max(
            (
                sum(p.lanes * p.block_bytes for p in stage.pools if p.domain == "rows")
                for stage in probe.stages(self.pp)
            ),
            default=0,
        )
        if row_bytes == 0:
            return MAX_REQUESTS
        return max(MIN_REQUESTS, min(MAX_REQUESTS, int(self.capacity_bytes * ROWS_SHARE) // row_bytes))

    def load(self) -> list[Request]:
        """The requests.

        Raises:
            ConfigError: the trace is missing or malformed.
        """
        return traces.load(self.trace, requests=self.requests, seed=self.seed)


def shape_of(model: ModelSpec) -> Shape:
    """What the scheduler needs to know of a model."""
    sizes = {domain.name: domain for domain in model.domains}
    full, swa = sizes.get("full"), sizes.get("swa")
    slots = tuple(domain.name for domain in model.domains if domain.block_tokens == 0)
    token_domains = [domain for domain in (full, swa) if domain is not None]
    return Shape(
        full_tokens=full.block_tokens if full is not None else 0,
        swa_tokens=swa.block_tokens if swa is not None else 0,
        window_tokens=swa.window_tokens if swa is not None else 0,
        slots=slots,
        slot_limit=min((sizes[name].blocks - 1 for name in slots), default=1 << 30),
        # Recurrent state cannot be entered in the middle of a prefix.
        share_prefixes=full is not None
        and "mamba" not in sizes
        and all(CacheShape.fits(domain.block_tokens) for domain in token_domains),
    )


def _overridden(config: Config, option: str, value: object, fields: Mapping[str, object]) -> Config:
    try:
        return config.override(**fields)
    except ConfigError as error:
        raise ConfigError(f"{option} {value}: {error}") from error


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} {value}: choose one of {', '.join(choices)}")


__all__ = ["BACKENDS", "LAUNCHERS", "ReplayOptions", "shape_of"]

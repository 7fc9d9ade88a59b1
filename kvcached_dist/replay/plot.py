"""A picture of the run: physical against static memory over virtual time, per rank."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .outcome import Event, RankOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 1 << 20
_MARKS = {
    # kind: (marker, colour, height in the axes, label)
    "grow": ("|", "tab:green", 0.965, "growth"),
    "reclaim": ("|", "tab:blue", 0.925, "reclaim"),
    "retract": ("v", "tab:orange", 0.885, "retraction"),
    "fault": ("x", "tab:red", 0.845, "fault"),
}


def check(path: str) -> None:
    """Refuse early what could not be drawn at the end.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path}: needs matplotlib; install it (pip install matplotlib) or leave --plot out")
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: the name must end in .png, .svg or .pdf, for example memory.png")
    if not target.parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {target.parent} does not exist; create it or choose another")


def draw(path: str, outcomes: list[RankOutcome], tp: int, title: str) -> None:
    """Write the picture.

    Args:
        path: file to write; its suffix names the format.
        outcomes: reports of the ranks.
        tp: tensor-parallel size, for the names of the ranks.
        title: heading.

    Blocks: for the drawing, about a second.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 2 if len(outcomes) > 1 else 1
    rows = -(-len(outcomes) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(7.5 * columns, 3.4 * rows + 0.9), sharex=True, squeeze=False, layout="constrained"
    )
    axes = [axis for line in grid for axis in line]
    for axis, outcome in zip(axes, outcomes, strict=False):
        _rank(axis, outcome, tp)
    for axis in axes[len(outcomes) :]:
        axis.set_visible(False)
    for axis in grid[-1]:
        axis.set_xlabel("virtual time [s]")
    handles, labels = axes[0].get_legend_handles_labels()
    for axis in axes[1 : len(outcomes)]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _rank(axis: Axes, outcome: RankOutcome, tp: int) -> None:
    times = [when / 1e6 for when, _ in outcome.curve]
    held = [value / _MIB for _, value in outcome.curve]
    if times:
        times.append(max(times[-1], outcome.virtual_us / 1e6))
        held.append(held[-1])
    axis.step(times, held, where="post", color="black", linewidth=1.1, label="physical")
    axis.fill_between(times, held, step="post", color="black", alpha=0.08)
    axis.axhline(outcome.static_bytes / _MIB, color="tab:red", linestyle="--", linewidth=1, label="static")
    axis.axhline(outcome.physical_mean / _MIB, color="tab:purple", linestyle=":", linewidth=1, label="mean")
    for kind, (marker, colour, height, label) in _MARKS.items():
        at = _times(outcome.events, kind)
        if at:
            axis.plot(
                at, [height] * len(at), marker, color=colour, markersize=7, linestyle="none", label=label,
                transform=axis.get_xaxis_transform(),
            )  # fmt: skip
    pp_rank, tp_rank = divmod(outcome.rank, tp)
    axis.set_title(f"rank {outcome.rank} (stage {pp_rank}, tp {tp_rank})", fontsize=10)
    axis.set_ylabel("memory [MiB]")
    top = max([outcome.static_bytes / _MIB, *held])
    axis.set_ylim(0, top * 1.3)
    axis.grid(alpha=0.25)


def _times(events: list[Event], kind: str) -> list[float]:
    return [event.at_us / 1e6 for event in events if event.kind == kind]


__all__ = ["check", "draw"]

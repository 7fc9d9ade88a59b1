"""Dummy weights of a size with which greedy tokens depend on the context: a plugin of the engine.

The engine fills dummy weights with values of at most 0.001. Norms are such weights too, so every layer adds next to
nothing to the embedding of the last token, and whatever the pools hold, two tokens follow each other for ever. These
weights are drawn anew, per parameter from a seed of its name: matrices keep the size of what goes through them, norms
lie around one, and those of queries and keys are larger, so that attention chooses. The same on every rank and in every
server, native or elastic. In force wherever this folder is on Python's path.
"""

from __future__ import annotations

import logging
import math
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DONE = "event=seeded_weights"
"""In the log of every server whose weights were drawn here."""

CHOOSING = ("q_norm", "k_norm", "kv_norm", "compressor")
"""Parts with norms before attention: scores of a larger spread make it look at some tokens and not at their mean."""


def register() -> None:
    """Entry point of the engine's plugin group."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", draw, HookType.AROUND)


def draw(original: Any, model: torch.nn.Module, *args: Any, **options: Any) -> None:
    """After the engine has filled what it fills, fill all parameters of floating-point numbers again."""
    import torch

    original(model, *args, **options)
    count = 0
    for name, parameter in model.named_parameters():
        if torch.is_floating_point(parameter):
            low, high = spread(name, tuple(parameter.shape))
            generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
            # Numbers of eight bits cannot be drawn.
            dtype = parameter.dtype if torch.finfo(parameter.dtype).bits >= 16 else torch.float16
            drawn = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
            parameter.data.copy_(drawn.uniform_(low, high, generator=generator))
            count += 1
    logging.getLogger(__name__).warning("%s parameters=%d", DONE, count)


def spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Between which values a parameter is drawn.

    Args:
        name: of the parameter.
        shape: as this rank has it; the last dimension is what a product sums over.
    """
    *above, module, kind = f".{name}".split(".")
    if "scale" in kind:
        return 1.0, 1.0
    if "embed" in module:
        return -math.sqrt(3), math.sqrt(3)
    if len(shape) > 1:
        limit = math.sqrt(3 / shape[-1])
        return -limit, limit
    if "norm" in module:
        return (1.5, 2.5) if {module, *above[-1:]} & {*CHOOSING} else (0.5, 1.5)
    return -0.5, 0.5

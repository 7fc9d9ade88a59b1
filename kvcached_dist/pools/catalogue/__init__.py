"""Known models: ``get(name, **options)`` gives a :class:`~kvcached_dist.pools.sizing.ModelPlan`."""

from __future__ import annotations

from . import attention, deepseek_v4, recurrent
from .attention import AttentionConfig, LatentConfig
from .deepseek_v4 import CompressedConfig
from .recurrent import RecurrentConfig
from .registry import get, names, options, register

__all__ = [
    "AttentionConfig",
    "CompressedConfig",
    "LatentConfig",
    "RecurrentConfig",
    "attention",
    "deepseek_v4",
    "get",
    "names",
    "options",
    "recurrent",
    "register",
]

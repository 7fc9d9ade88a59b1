"""Stands for torchvision, which text models never call."""

from __future__ import annotations

from absent import stand_in  # type: ignore[import-not-found]

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)

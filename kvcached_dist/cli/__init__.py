"""The command ``kvcached-dist``.

Subcommands are modules that are imported when they are asked for: ``status`` must answer at once and must
not import torch.
"""

from .app import main

__all__ = ["main"]

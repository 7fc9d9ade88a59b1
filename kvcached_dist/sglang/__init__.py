"""Elastic KV memory for SGLang: a plugin of the engine's own entry-point group ``sglang.srt.plugins``.

Off unless ``ENABLE_KVCACHED`` and ``KVCACHED_AUTOPATCH`` are on, and nothing of SGLang, of torch or of this library
beyond the settings is imported before that is known. See ``docs/sglang.md``.
"""

from __future__ import annotations


def register() -> None:
    """Entry point: registers the hooks, or nothing.

    Raises:
        SystemExit: with ``KVCACHED_REQUIRE``, when a setting is unusable or the engine lacks a place that is hooked.
            The engine only logs ordinary exceptions of a plugin and would go on without it.
    """
    from ..config import enabled

    if not enabled():
        return
    from . import plugin

    plugin.register()


__all__ = ["register"]

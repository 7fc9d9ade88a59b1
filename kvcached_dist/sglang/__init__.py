"""Elastic KV memory for SGLang: a plugin of the engine's own entry-point group ``sglang.srt.plugins``.

Off unless ``ENABLE_KVCACHED`` and ``KVCACHED_AUTOPATCH`` are on, and nothing of SGLang, of torch or of this library
beyond the settings is imported before that is known. See ``docs/sglang.md``.
"""

from __future__ import annotations

import logging
import os

_log = logging.getLogger("kvcached_dist.sglang")

_OFF = ("", "0", "false", "no", "off")


def register() -> None:
    """Entry point: registers the hooks, or nothing.

    Raises:
        SystemExit: with ``KVCACHED_REQUIRE``, when this library cannot be imported, a setting is unusable or the
            engine lacks a place that is hooked. The engine only logs ordinary exceptions of a plugin and would go on
            without it.
    """
    try:
        from ..config import enabled

        if not enabled():
            return
        from . import plugin

        plugin.register()
    except Exception as error:  # whatever it is: the engine would swallow it, and the switch with it
        _not_registered(error)


def _not_registered(error: Exception) -> None:
    """Ends the start where elastic pools are required; else one line says why they stay native."""
    # From the environment itself: what cannot be imported may be the settings.
    if not _on("ENABLE_KVCACHED"):
        return
    why = f"{type(error).__name__}: {error}"
    if _on("KVCACHED_REQUIRE"):
        raise SystemExit(f"kvcached_dist: KVCACHED_REQUIRE=1, but the pools would stay native: {why}") from error
    _log.warning("event=plugin elastic=no why=%r", why)


def _on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in _OFF


__all__ = ["register"]

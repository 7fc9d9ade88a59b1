"""Requests to release the engine's memory and to take it back: refused while pools are elastic; the server lives on.

The engine would pause its memory saver, which does not own elastic buffers, and flush the cache; taking memory back
that was never released ends its scheduler. The engine's answer has no room for a reason, so its front end asks for the
scheduler's state first, which says whether pools are elastic.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from .runtime import Runtime

_log = logging.getLogger("kvcached_dist.sglang")

STATE = "kvcached_dist"
"""Key in the internal state of a scheduler."""

WHY = (
    "not supported with elastic KV pools: what the prefix cache does not use is given back at idle without being"
    " asked; flush the cache (/flush_cache) to give back the rest. Start without ENABLE_KVCACHED to use the engine's"
    " memory saver."
)


class Offload:
    """Hooks in the front end and in the schedulers.

    Args:
        runtime: what is elastic in this process; nothing is in a front end.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def tell_state(self, answer: Any, _scheduler: Any, *_: Any) -> None:
        """After ``get_internal_state`` of a scheduler: what it tells of us, also at ``/server_info``."""
        runtime = self._runtime
        answer.internal_state[STATE] = {
            "elastic": runtime.elastic,
            "native_because": runtime.reason,
            "parked_chunks": runtime.parked.rounds,
            "evicted_tokens": runtime.evicted_tokens,
            "compacted_tokens": runtime.compacted_tokens,
        }

    async def ask_release(self, original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
        """In the front end: a clear error before anything is asked of a scheduler."""
        await self._refuse(manager, "release_memory_occupation")
        return await original(manager, *args, **kwargs)

    async def ask_resume(self, original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`ask_release`."""
        await self._refuse(manager, "resume_memory_occupation")
        return await original(manager, *args, **kwargs)

    def release(self, original: Any, updater: Any, request: Any) -> Any:
        """In a scheduler, should a request have come another way: nothing happens."""
        return self._ignore("Release", request) if self._runtime.elastic else original(updater, request)

    def resume(self, original: Any, updater: Any, request: Any) -> Any:
        """As :meth:`release`."""
        return self._ignore("Resume", request) if self._runtime.elastic else original(updater, request)

    async def _refuse(self, manager: Any, what: str) -> None:
        states = await manager.get_internal_state()
        if any(state.get(STATE, {}).get("elastic") for state in states):
            raise ValueError(f"{what} is {WHY}")

    def _ignore(self, kind: str, request: Any) -> Any:
        _log.error("event=ignored request=%s why=%r", type(request).__name__, WHY)
        return getattr(importlib.import_module("sglang.srt.managers.io_struct"), f"{kind}MemoryOccupationReqOutput")()


__all__ = ["Offload"]

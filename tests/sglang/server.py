"""The real server as a child process: started, asked, watched from outside, ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvcached_dist.snapshot import RankView, list_engines
from tests.sglang.conftest import ENGINE_ENVIRONMENT, STANDINS

READY_S = 240.0
"""Longest start on a busy machine with two cores."""


def free_port() -> int:
    """A port that nobody listens on now, and that no outgoing connection gets until a server has started.

    Those get the ports that the kernel gives to whoever asks for any (32768 and up on Linux): one of them had taken the
    port of a server in the ten seconds that its start takes.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def eventually(reached: Callable[[], bool], what: Callable[[], object], wait_s: float = 60.0) -> None:
    """Wait until something holds; ``what`` is told when it does not."""
    deadline = time.monotonic() + wait_s
    while not reached():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


_started: list[Server] = []


def running() -> list[Server]:
    """Servers that were started and not stopped, whether they live or not."""
    return list(_started)


@dataclass(eq=False)
class Server:
    """One running server.

    Attributes:
        port: where it answers.
        name: engine name of its snapshots.
        state_dir: where they are.
        log: file with everything it printed.
        process: the launcher.
    """

    port: int
    name: str
    state_dir: Path
    log: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(
        cls,
        model: Path,
        folder: Path,
        *,
        tp: int,
        pp: int = 1,
        options: Sequence[str],
        settings: Mapping[str, str],
    ) -> Server:
        """Start it and wait until it is ready.

        Args:
            model: folder of the model.
            folder: for the log and the snapshots.
            tp: tensor-parallel ranks.
            pp: pipeline stages.
            options: further arguments of the server.
            settings: environment variables on top of the engine's own.

        Raises:
            AssertionError: it ended or was not ready in time; with the end of its log.
        """
        port, log = free_port(), folder / "server.log"
        command = [
            sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu",
            "--host", "127.0.0.1", "--port", str(port), "--sampling-backend", "pytorch", "--max-running-requests", "8",
            "--tp", str(tp), "--pp-size", str(pp), *options,
        ]  # fmt: skip
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("KVCACHED_", "ENABLE_KV"))},
            **ENGINE_ENVIRONMENT,
            "PYTHONPATH": str(STANDINS),
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % 2) for rank in range(tp * pp)),
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "KVCACHED_IPC_NAME": "served",
            "KVCACHED_DIST_STATE_DIR": str(folder),
            **settings,
        }
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        server = cls(port, "served", folder, log, process)
        _started.append(server)
        try:
            server._await_ready()
        except BaseException:
            server.stop()
            raise
        return server

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.tail()}"
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health_generate", timeout=10).close()
                return
            time.sleep(0.2)
        raise AssertionError(f"not ready after {READY_S:.0f} s:\n{self.tail()}")

    def stop(self) -> None:
        """End it and everything that it started."""
        with contextlib.suppress(ValueError):
            _started.remove(self)
        members = [self.process.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            members += [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        for pid in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        self.process.wait(10)

    # ------------------------------------------------------------------ requests

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 120.0) -> Any:
        """One request; the decoded answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body or {}).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def generate(self, prompt: Sequence[int], tokens: int, timeout_s: float = 120.0) -> list[int]:
        """Greedy tokens."""
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.post("/generate", {"input_ids": list(prompt), "sampling_params": parameters}, timeout_s)
        found: list[int] = answer["output_ids"]
        return found

    def drafts_accepted(self, prompt: Sequence[int]) -> float:
        """Share of the drafts that were right in 60 tokens behind a prompt."""
        parameters = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
        answer = self.post("/generate", {"input_ids": list(prompt), "sampling_params": parameters})
        return float(answer["meta_info"]["spec_accept_rate"])

    def flush(self) -> None:
        """Empty the prefix cache; waits until nothing runs."""
        deadline = time.monotonic() + 30
        while True:
            try:
                assert "flushed" in str(self.post("/flush_cache"))
                return
            except urllib.error.HTTPError:
                assert time.monotonic() < deadline, self.tail()
                time.sleep(0.1)

    def told(self) -> Mapping[str, Any]:
        """What rank 0's scheduler says of the library at ``/server_info``."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=30) as answer:
            states: list[dict[str, Any]] = json.load(answer)["internal_states"]
        found: Mapping[str, Any] = states[0]["kvcached_dist"]
        return found

    # ------------------------------------------------------------------ from outside

    def ranks(self) -> list[RankView]:
        """Snapshots of all ranks, as ``kvcached-dist status`` reads them."""
        return [
            rank for engine in list_engines(str(self.state_dir)) if engine.name == self.name for rank in engine.ranks
        ]

    def states(self) -> list[dict[str, Any]]:
        """What the snapshots say, in rank order."""
        return [rank.state for rank in sorted(self.ranks(), key=lambda view: view.rank) if rank.state is not None]

    def mapped_bytes(self) -> list[int]:
        """Mapped bytes per rank."""
        return [sum(pool["mapped_bytes"] for pool in state["pools"].values()) for state in self.states()]

    def published(self) -> list[dict[str, int]]:
        """Published blocks of every domain, per rank."""
        return [{name: domain["published"] for name, domain in state["domains"].items()} for state in self.states()]

    def counter(self, name: str) -> int:
        """A counter of the leader."""
        return int(self.states()[0]["counters"].get(name, 0))

    def grows(self) -> int:
        """Published grows."""
        return self.counter("grow_foreground") + self.counter("grow_background")

    def tail(self, lines: int = 40) -> str:
        """End of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

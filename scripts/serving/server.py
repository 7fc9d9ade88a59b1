"""One server of the engine on cards, native or elastic."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kvcached_dist.snapshot import list_engines

from .models import THE_MODEL, Model
from .weights.seeded_weights import DONE

READY_S = 400.0
"""A first start on a machine builds kernels."""

WEIGHTS = Path(__file__).resolve().parent / "weights"
"""The plugin that draws the weights."""

SHORT = (5, 6, 7)
"""A prompt that takes next to nothing."""

_PREFILL = re.compile(r"Prefill batch \[(\d+)\]")
"""In the engine's log, with SGLANG_LOG_FORWARD_ITERS: the number of the step."""

_LOG_S = 10.0
"""How long the log may take to show a request that has been answered."""


def states(folder: str, name: str) -> list[dict[str, Any]]:
    """Snapshots of all ranks of an engine, in rank order."""
    engines = [engine for engine in list_engines(folder) if engine.name == name]
    views = sorted((rank for engine in engines for rank in engine.ranks), key=lambda view: view.rank)
    return [dict(view.state) for view in views if view.state is not None]


def mapped_bytes(folder: str, name: str) -> list[int]:
    """Mapped bytes of the pools of an engine per rank."""
    return [sum(pool["mapped_bytes"] for pool in state["pools"].values()) for state in states(folder, name)]


@dataclass(frozen=True, slots=True)
class Switch:
    """Stops a server and lets it go on.

    Attributes:
        pids: its processes.
    """

    pids: list[int]

    def stop(self) -> None:
        """Nothing of it runs from now on."""
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """All of it runs."""
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)


@dataclass(eq=False)
class Server:
    """One running server.

    Attributes:
        name: engine name of its snapshots.
        elastic: with this library's pools.
        port: where it answers.
        folder: of its log and snapshots.
        process: the launcher.
        settings: environment variables of this library that it was started with.
        capacity_tokens: tokens of its pools.
    """

    name: str
    elastic: bool
    port: int
    folder: Path
    process: subprocess.Popen[bytes]
    settings: Mapping[str, str]
    capacity_tokens: int
    _own_steps: int = field(default=0, init=False)

    @classmethod
    def launch(
        cls,
        name: str,
        model: Model,
        folder: Path,
        *,
        elastic: bool,
        tp: int = 1,
        cards: Sequence[int] = (),
        tokens: int | None = None,
        options: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> Server:
        """Start it; :meth:`ready` waits for it.

        Args:
            name: of the engine.
            model: what is served.
            folder: for the model, the log and the snapshots.
            elastic: with this library's pools.
            tp: tensor-parallel ranks, one card each.
            cards: which ones; default the first.
            tokens: capacity of the pools; default the model's.
            options: further arguments of the server.
            settings: environment variables on top.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        path = model.write(folder / f"model-{model.name}")
        capacity = tokens or model.capacity_tokens
        command = [
            sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(path), "--load-format",
            "dummy", "--host", "127.0.0.1", "--port", str(port), "--sampling-backend", "pytorch", "--grammar-backend",
            "none", "--disable-custom-all-reduce", "--mem-fraction-static", "0.9", "--max-total-tokens",
            str(capacity), "--random-seed", "7", "--tp", str(tp),
            *(str(path) if option == THE_MODEL else option for option in model.options), *options,
        ]  # fmt: skip
        ours = {
            "ENABLE_KVCACHED": "1",
            "KVCACHED_REQUIRE": "1",
            "KVCACHED_IPC_NAME": name,
            "KVCACHED_DIST_STATE_DIR": str(folder),
            "KVCACHED_PHYSICAL_GROWTH_LOCK_DIR": str(folder),
            # A server that waits for its turn is stopped: that must not look like a hung rank.
            "KVCACHED_DIST_LEASE_S": "600",
        }
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("KVCACHED_", "ENABLE_KV"))},
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
            # Servers stand side by side and start at the same time: one card is fuller than the other meanwhile.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            "SGLANG_LOG_FORWARD_ITERS": "1",
            **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, cards))} if cards else {}),
            **model.settings,
            **(ours if elastic else {}),
            **(settings or {}),
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(WEIGHTS), environment.get("PYTHONPATH"))))
        with (folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        known = {key: value for key, value in environment.items() if key.startswith("KVCACHED_")}
        return cls(name, elastic, port, folder, process, known, capacity)

    def ready(self) -> float:
        """Wait until it answers a request; seconds that it took.

        Raises:
            RuntimeError: it ended, was not ready in time or has other weights than these benchmarks draw; with the end
                of its log.
        """
        begin = time.monotonic()
        while time.monotonic() < begin + READY_S:
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                self.generate(SHORT, 2)
                seconds = time.monotonic() - begin
                if DONE not in self.log():
                    raise RuntimeError(f"server {self.name} has not drawn its weights:\n{self.tail()}")
                return seconds
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.5)
        raise RuntimeError(f"server {self.name} did not become ready:\n{self.tail()}")

    def stop(self) -> None:
        """End it and everything that it started."""
        self._signal(signal.SIGKILL)
        self.process.wait(20)

    def switch(self) -> Switch:
        """Stops and starts it often: the processes are looked up here and not each time."""
        return Switch([member.pid for member in self._members()] + [self.process.pid])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stopped meanwhile: an idle scheduler spins, and takes time from whoever shares its core."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def pin(self, cpus: Sequence[int]) -> None:
        """All its threads run on these processors from now on, and those that they start."""
        for member in (self.process.pid, *(member.pid for member in self._members())):
            with contextlib.suppress(FileNotFoundError):
                for thread in os.listdir(f"/proc/{member}/task"):
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(int(thread), cpus)

    def pin_schedulers(self, cpus: Sequence[int]) -> None:
        """The thread of each rank that runs the engine's steps has a processor of its own; all others keep off it.

        Args:
            cpus: of the ranks, in their order; the others are what this process may use besides.
        """
        self.pin(sorted(os.sched_getaffinity(0) - set(cpus)))
        schedulers = [member for member in self._members() if "sglang::scheduler" in " ".join(member.cmdline())]
        for member, cpu in zip(sorted(schedulers, key=lambda member: member.cmdline()), cpus, strict=True):
            os.sched_setaffinity(member.pid, [cpu])

    def _signal(self, number: signal.Signals) -> None:
        for member in self._members():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)
        self.process.send_signal(number)

    def _members(self) -> list[psutil.Process]:
        """Processes that the launcher has started, with theirs."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    # ------------------------------------------------------------------ requests

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One request; the decoded answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body or {}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def generate(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and the log probability of each."""
        answer = self.answer(prompt, tokens)
        return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]

    def answer(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        """All that the engine says of one greedy request."""
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": parameters, "return_logprob": True}
        return dict(self.post("/generate", body))

    def flush(self) -> None:
        """Empty the prefix cache; waits until nothing runs."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.post("/flush_cache")
                return
            except urllib.error.HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    # ------------------------------------------------------------------ from outside

    def states(self) -> list[dict[str, Any]]:
        """Snapshots of all ranks, in rank order; none of a native server."""
        return states(str(self.folder), self.name)

    def mapped_bytes(self) -> list[int]:
        """Mapped bytes of the pools per rank."""
        return mapped_bytes(str(self.folder), self.name)

    def counters(self) -> dict[str, int]:
        """Counters of the leader; empty for a native server."""
        states = self.states()
        return dict(states[0]["counters"]) if states else {}

    def log(self) -> str:
        """Everything it printed."""
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def steps(self) -> int:
        """Steps of the engine so far, without those of this function; nothing may be running.

        The engine numbers its steps, and prints the number with a prefill: so two short requests are asked, of which
        the first one is in the first step that does not count, and both together tell how many steps one takes.

        Raises:
            RuntimeError: the log does not show them.
        """
        first, second = self._step_of_a_request(), self._step_of_a_request()
        before = first - 1 - self._own_steps
        self._own_steps += 2 * (second - first)
        return before

    def _step_of_a_request(self) -> int:
        seen = len(_PREFILL.findall(self.log()))
        self.generate(SHORT, 1)
        deadline = time.monotonic() + _LOG_S
        while len(numbers := _PREFILL.findall(self.log())) == seen:
            if time.monotonic() > deadline:
                raise RuntimeError(f"server {self.name} does not print the numbers of its steps:\n{self.tail()}")
            time.sleep(0.005)
        return int(numbers[-1])

    def tail(self, lines: int = 40) -> str:
        """End of its log."""
        kept = [line for line in self.log().splitlines() if "Ignore import" not in line]
        return "\n".join(kept[-lines:])

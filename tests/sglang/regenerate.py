"""Reference tokens from the engine's own pools: ``python -m tests.sglang.regenerate [NAME]`` in ``.venv-sglang``.

Tokens of random weights depend on the order of floating-point sums, so they hold for one parallel size and one kind
of processor; the file says which.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.sglang import cases
from tests.sglang.models import DSV4_OPTIONS, LLAMA_OPTIONS, write_dsv4, write_llama
from tests.sglang.models_attention import (
    MLA_OPTIONS,
    SPECULATION_OPTIONS,
    SWA_OPTIONS,
    THE_MODEL,
    write_mla,
    write_swa,
)
from tests.sglang.server import Server

REFERENCES = Path(__file__).parent / "reference"


@dataclass(frozen=True)
class Served:
    """One way in which a model is served, natively and elastically.

    Attributes:
        name: of the file with its tokens.
        write: writes the model into a folder.
        ask: asks the requests whose tokens are compared.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        options: of the server.
        settings: environment variables.
    """

    name: str
    write: Callable[[Path], Path]
    ask: Callable[[cases.Generate, Callable[[], None]], Mapping[str, list[int]]]
    tp: int
    pp: int
    options: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)

    def start(self, folder: Path, settings: Mapping[str, str]) -> Server:
        """Serve it, with more environment variables."""
        model = self.write(folder)
        options = [str(model) if option == THE_MODEL else option for option in self.options]
        return Server.start(
            model, folder, tp=self.tp, pp=self.pp, options=options, settings={**self.settings, **settings}
        )  # fmt: skip

    @property
    def reference(self) -> Mapping[str, list[int]]:
        """The committed tokens of the native pools."""
        found: Mapping[str, list[int]] = json.loads((REFERENCES / f"{self.name}.json").read_text())["tokens"]
        return found


LLAMA = Served("llama_tp2", write_llama, cases.llama, 2, 1, (*LLAMA_OPTIONS, "--chunked-prefill-size", "256"))
DSV4 = Served("dsv4_tp2_pp2", write_dsv4, cases.dsv4, 2, 2, DSV4_OPTIONS, {"TOY_DSV4": "1"})

CPU_ATTENTION = {"CPU_ATTENTION": "1"}
MLA = Served(
    "mla_tp2", write_mla, cases.llama, 2, 1, (*MLA_OPTIONS, "--page-size", "64", "--chunked-prefill-size", "256"),
    CPU_ATTENTION,
)  # fmt: skip
SWA = Served(
    "swa_tp2_pp2", write_swa, cases.llama, 2, 2, (*SWA_OPTIONS, "--page-size", "16", "--chunked-prefill-size", "256"),
    CPU_ATTENTION,
)  # fmt: skip
SPECULATION = Served(
    "speculation_tp2", write_llama, cases.llama, 2, 1,
    (*SPECULATION_OPTIONS, "--page-size", "16", "--chunked-prefill-size", "256"), CPU_ATTENTION,
)  # fmt: skip


def regenerate(served: Served) -> None:
    """Serve natively, ask, write the file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        server = served.start(Path(name), {})
        try:
            tokens = served.ask(server.generate, server.flush)
        finally:
            server.stop()
    REFERENCES.mkdir(exist_ok=True)
    about = {"machine": platform.machine(), "processor": _processor(), "options": list(served.options)}
    text = json.dumps({**about, "tokens": tokens}, indent=1) + "\n"
    (REFERENCES / f"{served.name}.json").write_text(text)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    for chosen in (LLAMA, DSV4, MLA, SWA, SPECULATION):
        if chosen.name in sys.argv[1:] or not sys.argv[1:]:
            regenerate(chosen)

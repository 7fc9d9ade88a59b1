"""How the tiny models are served in the complete run: each row a server natively, then one with elastic pools.

The rows for Llama hold every pair of values of two columns that the engine can serve (it has no overlap of schedule
and forward with pipeline stages), not the full product.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.sglang import cases
from tests.sglang.models import DSV4_OPTIONS, LLAMA_OPTIONS, write_dsv4, write_llama
from tests.sglang.regenerate import Served

PREFILLS = {
    "whole": ("--chunked-prefill-size", "-1"),
    "chunked": ("--chunked-prefill-size", "256"),
    "mixed": ("--chunked-prefill-size", "256", "--enable-mixed-chunk"),
}

RETRACTIONS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}
"""The engine retracts a request in every eleventh step as if its pool were full."""


@dataclass(frozen=True)
class Row:
    """One way of serving Llama.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        page: tokens in a page of the engine.
        radix: the prefix cache is on.
        overlap: the next step is scheduled while the last one runs.
        prefill: key of ``PREFILLS``.
        retract: retractions are forced.
    """

    tp: int
    pp: int
    page: int
    radix: bool
    overlap: bool
    prefill: str
    retract: bool

    @property
    def name(self) -> str:
        """Test id and key of the result."""
        words = [f"tp{self.tp}_pp{self.pp}", f"page{self.page}", "radix" if self.radix else "no_radix"]
        words += ["overlap" if self.overlap else "in_turn", self.prefill]
        return "-".join(words + ["retract"] * self.retract)

    def served(self) -> Served:
        """The server of this row."""
        options = [*LLAMA_OPTIONS, "--page-size", str(self.page), *PREFILLS[self.prefill]]
        options += ["--disable-radix-cache"] * (not self.radix)
        options += ["--disable-overlap-schedule"] * (not self.overlap)
        settings = RETRACTIONS if self.retract else {}
        return Served(self.name, write_llama, cases.llama, self.tp, self.pp, tuple(options), settings)


ROWS = (
    Row(1, 1, 1, True, False, "chunked", True),
    Row(1, 1, 16, False, True, "whole", False),
    Row(1, 1, 64, True, False, "mixed", False),
    Row(2, 1, 1, True, True, "mixed", False),
    Row(2, 1, 16, True, False, "whole", True),
    Row(2, 1, 64, False, True, "chunked", True),
    Row(1, 2, 1, False, False, "mixed", True),
    Row(1, 2, 16, True, False, "chunked", False),
    Row(1, 2, 64, False, False, "whole", True),
    Row(2, 2, 1, True, False, "whole", True),
    Row(2, 2, 16, False, False, "mixed", False),
    Row(2, 2, 64, True, False, "chunked", False),
)


DRAFTS = (
    "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", "2",
)  # fmt: skip
"""One token ahead; the draft model of DeepSeek-V4 comes with its target."""


def dsv4(tp: int, pp: int, *, online: bool, retract: bool = False, radix: bool = True, drafts: bool = False) -> Served:
    """DeepSeek-V4 with toy arithmetic.

    Args:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        online: the C128 state of a request is one row, not a ring of 128.
        retract: retractions are forced.
        radix: the prefix cache is on.
        drafts: its draft model proposes a token in every step.
    """
    words = [f"tp{tp}_pp{pp}", "online" if online else "offline"]
    words += ["no_radix"] * (not radix) + ["retract"] * retract + ["drafts"] * drafts
    settings = {"TOY_DSV4": "1", **({"SGLANG_OPT_USE_ONLINE_COMPRESS": "1"} if online else {})}
    options = (*DSV4_OPTIONS, *(() if radix else ("--disable-radix-cache",)), *(DRAFTS if drafts else ()))
    settings |= RETRACTIONS if retract else {}
    return Served("-".join(words), write_dsv4, cases.dsv4, tp, pp, options, settings)


DSV4_ROWS = (
    dsv4(1, 1, online=False),
    dsv4(1, 1, online=True, retract=True),
    dsv4(2, 1, online=True),
    dsv4(1, 2, online=False, retract=True),
    dsv4(2, 2, online=True),
    dsv4(2, 2, online=False, radix=False),
    dsv4(2, 1, online=False, drafts=True),
    dsv4(1, 1, online=False, drafts=True, retract=True),
)

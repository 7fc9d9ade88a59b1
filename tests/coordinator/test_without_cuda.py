"""R33: whoever has no device of its own pays for no CUDA context. A context takes hundreds of MiB of every card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

PROCESS = """
import contextlib, io, json, logging
import torch
from kvcached_dist import Config, _native

touched, seen = [], {}

def watch(owner, name):
    real = getattr(owner, name)
    def watched(*arguments, **options):
        touched.append(f"{owner.__name__}.{name}")
        return real(*arguments, **options)
    setattr(owner, name, watched)

watch(torch.cuda, "_lazy_init")
watch(_native, "cuda_available")
watch(_native, "CudaDevice")

def after(what, result):
    seen[what] = [result, touched.copy(), torch.cuda.is_initialized()]

from kvcached_dist.cli import main
from tests.coordinator.world import config, run_world, values

def body(rank):
    full = rank.coordinator.domains["full"]
    blocks = full.alloc(4)
    rank.meet()
    if rank.coordinator.leads:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = main(["status", "--json"])
        (engine,) = json.loads(out.getvalue())["engines"]
        after("status", [status, engine["live_ranks"]])
    rank.meet()
    full.free(blocks)
    rank.coordinator.idle(True)
    rank.settle()
    return blocks.tolist(), rank.returns_to_start()

settings = config(state_dir=Config.from_env().state_dir)
after("world", values(run_world(body, tp=2, settings=settings)))

from kvcached_dist import sglang
from kvcached_dist.sglang.plugin import Plugin
logging.disable()  # there is no engine here, which the entry point says
sglang.register()

class Registry:
    hooks = 0
    def register(self, target, call, kind):
        self.hooks += 1

class Kinds:
    BEFORE = AFTER = AROUND = None

registry = Registry()
Plugin(Config.preset("tests")).register(registry, Kinds)
after("plugin", registry.hooks > 10)
print(json.dumps(seen))
"""


def test_r33_neither_ranks_nor_the_plugin_nor_the_status_command_initialise_cuda() -> None:
    """Two ranks on host devices grow and give back, are looked at from outside, and the plugin registers its hooks."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ENABLE_KVCACHED": "1", "KVCACHED_AUTOPATCH": "1"}
    command = [sys.executable, "-c", PROCESS]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50)
    assert process.returncode == 0, process.stderr[-3000:]
    untouched: list[object] = [[], False]
    assert json.loads(process.stdout) == {
        "status": [[0, 2], *untouched],
        "world": [[[[1, 2, 3, 4], True]] * 2, *untouched],
        "plugin": [True, *untouched],
    }

"""A program whose child writes where no memory is, which the memory checker has to see before it is believed.

``scripts/check_gpu.py`` runs it below the checker. Both processes end with 0: only the checker can tell.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver, nvrtc

NOWHERE = 8
"""Nothing is ever mapped next to address 0. A multiple of 8, so that the kernel does nothing else that is wrong."""

_KERNEL = 'extern "C" __global__ void stray(long long *there) { *there = 1; }'


def ask(result: Sequence[Any]) -> Any:
    """The answer of a call, which has to succeed."""
    status, *answer = result
    assert int(status) == 0, status
    return answer[0] if answer else None


def write(address: int) -> None:
    """One long long, by a kernel on the first card."""
    ask(driver.cuInit(0))
    card = ask(driver.cuDeviceGet(0))
    ask(driver.cuCtxSetCurrent(ask(driver.cuDevicePrimaryCtxRetain(card))))
    kinds = driver.CUdevice_attribute
    major = ask(driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, card))
    minor = ask(driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, card))
    program = ask(nvrtc.nvrtcCreateProgram(_KERNEL.encode(), b"stray.cu", 0, [], []))
    ask(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
    code = bytes(ask(nvrtc.nvrtcGetCUBINSize(program)))
    ask(nvrtc.nvrtcGetCUBIN(program, code))  # writes into it
    function = ask(driver.cuModuleGetFunction(ask(driver.cuModuleLoadData(code)), b"stray"))
    ask(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, ((address,), (ctypes.c_void_p,)), 0))
    driver.cuCtxSynchronize()  # fails, and has to


if __name__ == "__main__":
    if sys.argv[1:] == ["child"]:
        write(NOWHERE)
    else:
        sys.exit(subprocess.run([sys.executable, __file__, "child"]).returncode)

"""What the driver itself says of an address, asked through cuda-python and not through this package's native code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

driver: Any = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
nvrtc: Any = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed")

SUCCESS = 0

_KERNEL = """
extern "C" __global__ void mismatches(const long long *base, long long stride, long long words, const long long *ids,
                                      long long expected, unsigned long long *out) {
  const long long *page = base + ids[blockIdx.x] * stride;
  for (long long i = threadIdx.x; i < words; i += blockDim.x)
    if (page[i] != expected) atomicAdd(out, 1ULL);
}
"""


def ask(result: Sequence[Any]) -> Any:
    """The answer of a driver call, which has to succeed."""
    status, *answer = result
    assert int(status) == SUCCESS, status
    return answer[0] if len(answer) == 1 else answer


def memory() -> tuple[int, int]:
    """Free and total bytes of the current card."""
    free, total = ask(driver.cuMemGetInfo())
    return int(free), int(total)


def granule_bytes(ordinal: int) -> int:
    """Least size of a physical handle of a card."""
    smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(ask(driver.cuMemGetAllocationGranularity(_pinned_on(ordinal), smallest)))


def home_of(address: int) -> int | None:
    """Card whose physical memory is mapped at an address; ``None``: nothing is."""
    status, handle = driver.cuMemRetainAllocationHandle(address)
    if int(status) != SUCCESS:
        return None
    try:
        properties = ask(driver.cuMemGetAllocationPropertiesFromHandle(handle))
        assert properties.type == driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        assert properties.location.type == driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        return int(properties.location.id)
    finally:
        ask(driver.cuMemRelease(handle))


def is_writable(address: int, ordinal: int) -> bool:
    """Whether a card may read and write at an address."""
    status, flags = driver.cuMemGetAccess(_location(ordinal), address)
    return int(status) == SUCCESS and int(flags) == int(driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)


def allow(address: int, size: int, ordinal: int) -> None:
    """Let another card read and write a mapped range."""
    access = driver.CUmemAccessDesc()
    access.location = _location(ordinal)
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ask(driver.cuMemSetAccess(address, size, [access], 1))


def read(address: int, size: int) -> bytes:
    """Bytes at an address of the current card, copied by the driver."""
    found = (ctypes.c_char * size)()
    ask(driver.cuMemcpyDtoH(ctypes.addressof(found), address, size))
    return bytes(found)


class Reader:
    """A kernel of one card that counts the words of some pages which are not what they should be.

    Args:
        card: the card that it runs on, whosever memory it reads.
    """

    def __init__(self, card: torch.device) -> None:
        self._card = card
        with torch.cuda.device(card):
            self._stream = torch.cuda.Stream(card)  # type: ignore[no-untyped-call]
            self._found = torch.zeros(1, dtype=torch.int64, device=card)
            torch.cuda.synchronize(card)
            program = ask(nvrtc.nvrtcCreateProgram(_KERNEL.encode(), b"reader.cu", 0, [], []))
            major, minor = torch.cuda.get_device_capability(card)
            ask(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
            code = bytes(ask(nvrtc.nvrtcGetCUBINSize(program)))
            ask(nvrtc.nvrtcGetCUBIN(program, code))  # writes into it
            self._module = ask(driver.cuModuleLoadData(code))
            self._function = ask(driver.cuModuleGetFunction(self._module, b"mismatches"))

    def launch(self, pages: torch.Tensor, ids: torch.Tensor, expected: int) -> None:
        """Queue one look at pages ``ids`` of ``pages`` (``[pages, words]``, int64, on any card)."""
        with torch.cuda.device(self._card):
            values = (
                pages.data_ptr(), pages.stride(0), pages.shape[1], ids.data_ptr(), expected, self._found.data_ptr(),
            )  # fmt: skip
            kinds = (ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
            stream = self._stream.cuda_stream
            ask(driver.cuLaunchKernel(self._function, len(ids), 1, 1, 256, 1, 1, 0, stream, (values, kinds), 0))

    def wait(self) -> None:
        """Until everything queued has looked."""
        self._stream.synchronize()

    def mismatches(self) -> int:
        """Words that were not as expected, over all looks."""
        self.wait()
        return int(self._found.item())


def _location(ordinal: int) -> Any:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = ordinal
    return location


def _pinned_on(ordinal: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(ordinal)
    return properties

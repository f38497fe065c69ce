"""Memory by address, and a CUDA runtime for machines that have none."""

import ctypes
import shutil
from pathlib import Path

import pytest

from megatron.swap.native.transfer_queue import HostCopy

HERE = Path(__file__).parent
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class FakeCuda:
    """A fake CUDA runtime: ``fake_cuda.cpp``."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_cuda_allow.argtypes = (ctypes.c_int64,)
        self._library.fake_cuda_record.argtypes = (ctypes.c_size_t, ctypes.c_size_t)

    def reset(self) -> None:
        self._library.fake_cuda_reset()

    def allow(self, operations: int) -> None:
        """Allow so many further operations; below 0: all."""
        self._library.fake_cuda_allow(operations)

    def fail(self, call: str, code: int = 1) -> None:
        self._library.fake_cuda_fail(call.encode(), code)

    def record(self, event: int, stream: int) -> None:
        self._library.fake_cuda_record(event, stream)

    @property
    def calls(self) -> list[str]:
        buffer = ctypes.create_string_buffer(1 << 20)
        self._library.fake_cuda_calls(buffer, ctypes.c_size_t(len(buffer)))
        return buffer.value.decode().splitlines()


class Memory:
    """A range of memory at an address."""

    def __init__(self, data: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(data, len(data))
        self.address = ctypes.addressof(self._buffer)

    @property
    def data(self) -> bytes:
        return self._buffer.raw


def copy(target: Memory, source: Memory) -> HostCopy:
    return HostCopy(target.address, source.address, len(source.data))

"""Known failure of offloading: host memory that cannot be page-locked."""

import subprocess
import threading
from pathlib import Path

import pytest
import torch

from megatron.swap.common.types import MIB
from megatron.swap.memory import host_memory
from megatron.swap.memory.host_memory import HostMemoryError, HostRegion, prepare_regions
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.native import build, cuda_library
from tests.unit.native.helpers import NEEDS_COMPILER

HERE = Path(__file__).parent
NATIVE = Path(build.__file__).parent


class Runtime:
    """A CUDA runtime that refuses to register and unregister. Like CUDA, it leaves each error with the calling thread
    until that thread asks for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = True
        self._of_thread = threading.local()
        monkeypatch.setattr(host_memory, "gpu_numa_node", lambda device: None)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch.cuda, "device", lambda _: threading.Lock())
        monkeypatch.setattr(cuda_library, "loaded_cuda_library", lambda: "libcudart")
        monkeypatch.setattr(cuda_library, "CDLL", lambda _: self)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return self._answer(2)

    def cudaHostUnregister(self, address: int) -> int:
        return self._answer(713)

    def cudaGetLastError(self) -> int:
        code: int = getattr(self._of_thread, "error", 0)
        self._of_thread.error = 0
        return code

    def launch(self) -> None:
        """Launch a kernel on this thread, as PyTorch does: it asks for the last error behind the launch."""
        if code := self.cudaGetLastError():
            raise RuntimeError(f"CUDA error {code} at a launch that is not to blame")

    def _answer(self, code: int) -> int:
        if not self.refuses:
            return 0
        self._of_thread.error = code
        return code


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


class TestFailedPageLock:
    """After a failed page-lock an unrelated kernel launch fails.

    Seen in vllm-project/vllm#51081, vllm-project/vllm#50070 and xcena-dev/maru#65: CUDA's last error stayed on the
    thread.

    Here: the thread clears the error at once. The caller learns the bytes and the flag to change; the guard goes on
    unlocked.
    """

    def test_registering(self, runtime: Runtime) -> None:
        region = HostRegion(MIB)
        with pytest.raises(HostMemoryError, match=r"cudaHostRegister refused 1\.00 MiB"):
            region.register(0)
        runtime.launch()

    def test_unregistering(self, runtime: Runtime) -> None:
        runtime.refuses = False
        (region,), _ = prepare_regions([MIB], device=0)
        runtime.refuses = True
        region.unregister()
        runtime.launch()

    def test_the_pool_goes_on(self, runtime: Runtime) -> None:
        pool = HostPool(limit=4 * MIB, slab_bytes=MIB, pinned=True, device=0)
        with pytest.raises(HostMemoryError, match="cudaHostRegister refused"):
            pool.lease(MIB)
        runtime.launch()
        assert pool.stats.reserved_bytes == pool.stats.num_leases == 0
        runtime.refuses = False
        pool.lease(MIB).free()
        pool.close()

    @pytest.mark.slow
    @NEEDS_COMPILER
    def test_in_the_guards_own_code(self, tmp_path: Path) -> None:
        made, torch_headers = tmp_path / "page_lock_case", Path(torch.__file__).parent / "include"
        sources = [HERE / "page_lock_case.cpp", NATIVE / "machines.cpp"]
        subprocess.run(["g++", "-std=c++20", "-I", NATIVE, "-I", torch_headers, *sources, "-o", made], check=True)
        told = subprocess.run([made], capture_output=True, text=True, check=True).stdout
        assert told == "cudaHostRegister: refused\nlaunch behind pin: 0\nlaunch behind unpin: 0\n"

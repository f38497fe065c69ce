"""The host budget on made-up machines, and how pages are prepared."""

import ctypes
import gc
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.swap.common.types import GIB, MIB
from megatron.swap.memory import host_memory
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_memory import (
    PAGE_BYTES,
    HostMemoryError,
    HostRegion,
    available_host_bytes,
    check_host_request,
    pci_numa_node,
    prepare_regions,
    safe_host_bytes,
)
from megatron.swap.memory.mapping import Mapping
from megatron.swap.memory.tiers.disk import DiskTier


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total_gib: float, available_gib: float | None) -> dict[str, str]:
    lines = [f"MemTotal: {int(total_gib * 1024**2)} kB"]
    if available_gib is None:
        lines += ["MemFree: 1048576 kB", "Buffers: 1048576 kB", "Cached: 2097152 kB", "HugePages_Total:   0"]
    else:
        lines.append(f"MemAvailable: {int(available_gib * 1024**2)} kB")
    return {"proc/meminfo": "\n".join(lines) + "\n"}


def cgroup2(folder: str, limit: str, used_gib: float = 0, cache_gib: float = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup{folder}"
    return {
        f"{base}/memory.max": limit + "\n",
        f"{base}/memory.current": f"{int(used_gib * GIB)}\n",
        f"{base}/memory.stat": f"anon 5\ninactive_file {int(cache_gib * GIB)}\nactive_file 7\n",
    }


VERSION_1 = "sys/fs/cgroup/memory"
BUDGETS: dict[str, tuple[dict[str, str], int | None, float, float]] = {
    "without a cgroup": (meminfo(256, 200), None, 200, 25.6),
    "a small machine": (meminfo(1, 1), None, 1, 0.25),
    "less is available than is left to others": (meminfo(64, 2), None, 2, 6.4),
    "an old kernel": (meminfo(64, None), None, 4, 6.4),
    "cache is free": (
        meminfo(256, 200) | {"proc/self/cgroup": "0::/\n"} | cgroup2("", str(64 * GIB), 20, 8), 64, 52, 6.4,
    ),
    "the host's path is not mounted": (
        meminfo(256, 200) | {"proc/self/cgroup": "0::/../kubepods/abc\n"} | cgroup2("", str(32 * GIB)), 32, 32, 4,
    ),
    "version 1": (
        meminfo(256, 200) | {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc\n",
            f"{VERSION_1}/docker/abc/memory.limit_in_bytes": f"{48 * GIB}\n",
            f"{VERSION_1}/docker/abc/memory.usage_in_bytes": f"{10 * GIB}\n",
            f"{VERSION_1}/docker/abc/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n",
            f"{VERSION_1}/memory.limit_in_bytes": "9223372036854771712\n",
        }, 48, 40, 4.8,
    ),
}  # fmt: skip
"""Files, and limit of the cgroup, available memory and what is left to others in GiB."""


class TestBudget:
    @pytest.mark.parametrize("case", BUDGETS)
    def test_what_is_safe(self, tmp_path, case):
        files, limit_gib, available_gib, headroom_gib = BUDGETS[case]
        root = write(tmp_path, files)
        one, eight = safe_host_bytes(1, root=root), safe_host_bytes(8, root=root)
        assert one.cgroup_limit_bytes == (limit_gib and limit_gib * GIB)
        assert one.available_bytes == available_gib * GIB
        assert one.headroom_bytes == pytest.approx(headroom_gib * GIB, abs=1)
        assert one.safe_bytes == max(0, one.available_bytes - one.headroom_bytes) // 4096 * 4096
        assert 0 <= one.safe_bytes - 8 * eight.safe_bytes < 8 * 4096
        assert "8 ranks" in eight.reason

    @pytest.mark.parametrize("files", [{}, {"proc/meminfo": "MemTotal: many kB\n"}])
    def test_unreadable_meminfo(self, tmp_path, files):
        with pytest.raises(HostMemoryError, match="proc/meminfo"):
            safe_host_bytes(1, root=write(tmp_path, files))

    def test_cgroup_v2_ancestors_limit_too(self, tmp_path):
        files = meminfo(256, 200) | {"proc/self/cgroup": "0::/pod/job/task\n"}
        files |= cgroup2("/pod/job/task", "max", 1) | cgroup2("/pod/job", str(100 * GIB), 1)
        files |= cgroup2("/pod", str(120 * GIB), 90)  # the wider limit is the fuller one
        stat = f"inactive_file 0\nactive_file {40 * GIB}\n"  # the kernel reclaims it for who grows
        root = write(tmp_path, {**files, "sys/fs/cgroup/pod/memory.stat": stat})
        budget = safe_host_bytes(1, root=root)
        assert budget.cgroup_limit_bytes == 100 * GIB
        assert (budget.available_bytes, available_host_bytes(root)) == (30 * GIB, 70 * GIB)


class TestRequest:
    def test_up_to_what_is_available(self, tmp_path):
        budget = safe_host_bytes(2, root=write(tmp_path, meminfo(64, 40)))
        check_host_request(20 * GIB, budget, unchecked=False)
        check_host_request(500 * GIB, budget, unchecked=True)
        with pytest.raises(HostMemoryError, match=r"(?s)20\.00 GiB.*2 ranks.*--swap-host-unchecked"):
            check_host_request(20 * GIB + 1, budget, unchecked=False)


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


class FakeCudart:
    """Registration without CUDA: remembers what is registered, refuses the ``refuse``-th call (1-based).

    As CUDA does, it refuses an address that is registered already (error 712).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.synchronized: list[int] = []
        self._num_calls, self._refuse = 0, refuse
        monkeypatch.setattr(host_memory, "gpu_numa_node", lambda device: None)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronized.append)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._num_calls += 1
        if self._num_calls == self._refuse:
            return 2
        if any(first < address + nbytes and address < first + size for first, size in self.registered.items()):
            return 712
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert is_mapped(address)
        del self.registered[address]
        return 0


class TestRegions:
    def test_a_refused_mapping_or_registration_undoes_the_others(self, monkeypatch):
        with pytest.raises(HostMemoryError, match=r"the system refused .*--swap-host-gib"):
            prepare_regions([1 << 60], device=None)
        cudart = FakeCudart(monkeypatch, refuse=3)
        with pytest.raises(HostMemoryError, match=r"cudaHostRegister refused 1.00 MiB .*--swap-host-gib"):
            prepare_regions([MIB] * 5, device=0)
        assert cudart.registered == {}

    def test_dropped_while_registered(self, monkeypatch):
        """The registration ends when no tensor is left and the device is idle, and before the unmapping."""
        cudart = FakeCudart(monkeypatch)
        regions, times = prepare_regions([MIB] * 2, device=1)
        assert 0 < times.touch_s <= times.total_s
        viewed, other = (region.address for region in regions)
        view = regions[0].tensor[5:]
        del regions
        gc.collect()
        assert set(cudart.registered) == {viewed}
        assert cudart.synchronized == [1]
        assert not is_mapped(other)
        del view
        assert cudart.registered == {}

    def test_the_buffers_of_a_closed_disk_tier_are_registered_no_more(self, monkeypatch, tmp_path):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        cudart, disk = FakeCudart(monkeypatch), DiskFile(str(tmp_path), MIB)
        tier = DiskTier(disk, PAGE_BYTES, pinned=True)
        assert cudart.registered
        tier.close()
        assert cudart.registered == {}
        disk.close()

    @pytest.mark.parametrize("where", ["ranks", "capture"])
    def test_dropped_where_a_finalizer_waits_for_nothing(self, where, monkeypatch):
        """The registration ends when memory is registered for the device the next time."""
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: where == "ranks")
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        cudart = FakeCudart(monkeypatch)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: where == "capture")
        regions, _ = prepare_regions([MIB] * 3, device=1)
        viewed, *others = (region.address for region in regions)
        view = regions[0].tensor[5:]
        del regions
        gc.collect()
        assert set(cudart.registered) == {viewed, *others}
        assert cudart.synchronized == [], "a finalizer waits for nothing"
        for number in range(2):
            regions, _ = prepare_regions([MIB] * 2, device=1)
            assert cudart.synchronized == [1] * (number + 1)
            assert set(cudart.registered) == {viewed, *(region.address for region in regions)}
            del regions
        del view
        (region,), _ = prepare_regions([MIB], device=1)
        region.unregister()
        assert cudart.registered == {}
        assert Mapping.dropped == []

    @pytest.mark.parametrize("node", [0, 1, 70])
    def test_pages_are_placed_by_a_mask_that_names_the_node_and_that_the_kernel_takes(self, node, monkeypatch):
        def mbind(number, address, nbytes, mode, mask, max_node, flags):
            assert max_node.value <= 8 * PAGE_BYTES, "the kernel refuses more"
            return [one for one in range(max_node.value - 1) if mask[one // 64] >> one % 64 & 1] != [node]

        monkeypatch.setattr(host_memory, "_libc", lambda: SimpleNamespace(madvise=lambda *_: 0, syscall=mbind))
        assert HostRegion(MIB, numa_node=node).near_node

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_child_does_not_share_the_pages(self):
        region = HostRegion(MIB)
        region.tensor.fill_(5)
        child = os.fork()
        if child == 0:  # zeros (wiped) or a fault (not inherited on old kernels), but never the parent's bytes
            os._exit(int(ctypes.string_at(region.address, 1) == b"\x05"))
        assert os.waitpid(child, 0)[1] != 256
        assert region.tensor[0].item() == 5


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("?", None)])
def test_numa_node_of_a_device(tmp_path, text, node):
    root = write(tmp_path, {"sys/bus/pci/devices/0000:1b:00.0/numa_node": text})
    assert pci_numa_node("0000:1B:00.0", root=root) == node

"""The host budget on made-up machines, and how pages are prepared."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.swap.common.types import GIB, MIB, SwapError, UsageError
from megatron.swap.memory import host_memory
from megatron.swap.memory.host_memory import (
    HostMemoryError,
    HostRegion,
    available_host_bytes,
    check_host_request,
    pci_numa_node,
    prepare_regions,
    safe_host_bytes,
)
from megatron.swap.memory.mapping import Mapping


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


BUDGETS: dict[str, tuple[dict[str, str], int | None, float, float]] = {
    "without a cgroup": (meminfo(256, 200), None, 200, 25.6),
    "a small machine": (meminfo(1, 1), None, 1, 0.25),
    "a machine of 24 GiB": (meminfo(24, 24), None, 24, 4),
    "less is available than is left to others": (meminfo(64, 2), None, 2, 6.4),
    "an old kernel": (meminfo(64, None), None, 4, 6.4),
    "cache is free": (
        meminfo(256, 200) | {"proc/self/cgroup": "0::/\n"} | cgroup2("", str(64 * GIB), 20, 8), 64, 52, 6.4,
    ),
    "the host's path is not mounted": (
        meminfo(256, 200) | {"proc/self/cgroup": "0::/../kubepods/abc\n"} | cgroup2("", str(32 * GIB)), 32, 32, 4,
    ),
    "no limit in a cgroup of version 1": (
        meminfo(256, 200) | {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes":
                             "9223372036854771712\n"}, None, 200, 25.6,
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

    @pytest.mark.parametrize("text", [None, "", "MemTotal: many kB\n", "MemFree: 3 kB\n"])
    def test_unreadable_meminfo(self, tmp_path, text):
        with pytest.raises(HostMemoryError, match="proc/meminfo"):
            safe_host_bytes(1, root=write(tmp_path, {} if text is None else {"proc/meminfo": text}))

    def test_cgroup_v2_ancestors_limit_too(self, tmp_path):
        files = meminfo(256, 200) | {"proc/self/cgroup": "0::/pod/job/task\n"}
        files |= cgroup2("/pod/job/task", "max", 1) | cgroup2("/pod/job", str(100 * GIB), 1)
        files |= cgroup2("/pod", str(120 * GIB), 90)  # the wider limit is the fuller one
        budget = safe_host_bytes(1, root=write(tmp_path, files))
        assert budget.cgroup_limit_bytes == 100 * GIB
        assert budget.available_bytes == 30 * GIB

    def test_cgroup_v1(self, tmp_path):
        base = "sys/fs/cgroup/memory/docker/abc"
        files = meminfo(256, 200) | {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc\n",
            f"{base}/memory.limit_in_bytes": f"{48 * GIB}\n",
            f"{base}/memory.usage_in_bytes": f"{10 * GIB}\n",
            f"{base}/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "123\n",
        }
        budget = safe_host_bytes(2, root=write(tmp_path, files))
        assert (budget.cgroup_limit_bytes, budget.available_bytes) == (48 * GIB, 40 * GIB)


class TestRequest:
    def test_up_to_what_is_available(self, tmp_path):
        budget = safe_host_bytes(2, root=write(tmp_path, meminfo(64, 40)))
        check_host_request(20 * GIB, budget, unchecked=False)
        check_host_request(500 * GIB, budget, unchecked=True)
        with pytest.raises(UsageError, match="greater than 0, got -1"):
            check_host_request(-GIB, budget, unchecked=True)
        with pytest.raises(HostMemoryError) as caught:
            check_host_request(20 * GIB + 1, budget, unchecked=False)
        message = str(caught.value)
        for part in ("--swap-host-gib", "--swap-host-unchecked", "--swap-layers", "20.00 GiB", "2 ranks"):
            assert part in message
        assert isinstance(caught.value, SwapError)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
        self.devices: list[int] = []
        self.num_calls = 0
        self.synchronized: list[int] = []
        self._refuse = refuse
        monkeypatch.setattr(host_memory, "gpu_numa_node", lambda device: None)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "set_device", self.devices.append)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronized.append)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

        class Device:
            def __init__(self, device: int) -> None: ...
            def __enter__(self) -> None: ...
            def __exit__(self, *error: object) -> None: ...

        monkeypatch.setattr(torch.cuda, "device", Device)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.num_calls += 1
        if self.num_calls == self._refuse:
            return 2
        if any(first < address + nbytes and address < first + size for first, size in self.registered.items()):
            return 712
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert is_mapped(address)
        del self.registered[address]
        return 0


AT_EXIT = """
from megatron.swap.memory.host_memory import HostRegion
region, dropped = (HostRegion(1 << 20, numa_node=None) for _ in range(2))
region._mapping.device = dropped._mapping.device = 0
del dropped
"""


class TestRegions:
    def test_touching_makes_every_page_resident(self, monkeypatch):
        FakeCudart(monkeypatch)
        monkeypatch.setattr(host_memory, "TOUCH_BYTES", 3 * MIB)
        before = resident_bytes()
        regions, times = prepare_regions([32 * MIB, 33 * MIB], device=0)
        assert resident_bytes() - before >= 60 * MIB
        assert [region.tensor.numel() for region in regions] == [32 * MIB, 33 * MIB]
        assert not any(region.tensor.any() for region in regions)
        assert 0 < times.touch_s <= times.total_s
        for region in regions:
            region.unregister()

    def test_untouched(self):
        before = resident_bytes()
        regions, _ = prepare_regions([256 * MIB], device=None)
        assert resident_bytes() - before < 128 * MIB
        assert regions[0].tensor.numel() == 256 * MIB

    def test_registers_whole_regions_for_the_device(self, monkeypatch):
        cudart = FakeCudart(monkeypatch)
        regions, _ = prepare_regions([MIB] * 5, device=3)
        assert cudart.registered == {region.address: MIB for region in regions}
        assert set(cudart.devices) == {3}
        for region in regions:
            region.unregister()
            region.unregister()
        assert cudart.registered == {}

    def test_a_refused_mapping_or_registration_undoes_the_others(self, monkeypatch):
        with pytest.raises(HostMemoryError, match=r"the system refused .*--swap-host-gib"):
            prepare_regions([1 << 60], device=None)
        cudart = FakeCudart(monkeypatch, refuse=3)
        with pytest.raises(HostMemoryError, match=r"cudaHostRegister refused 1.00 MiB .*--swap-host-gib"):
            prepare_regions([MIB] * 5, device=0)
        assert cudart.registered == {}

    def test_mapping_lives_as_long_as_a_view(self):
        region = HostRegion(64 * MIB)
        address = region.address + 32 * MIB
        view = region.tensor[32 * MIB :]
        del region
        gc.collect()
        assert view.fill_(7).sum().item() == 7 * 32 * MIB
        assert is_mapped(address)
        del view
        gc.collect()
        assert not is_mapped(address)

    def test_dropped_while_registered(self, monkeypatch):
        """The registration ends when no tensor is left and the device is idle, and before the unmapping."""
        cudart = FakeCudart(monkeypatch)
        regions, _ = prepare_regions([MIB] * 2, device=1)
        viewed, other = (region.address for region in regions)
        view = regions[0].tensor[5:]
        del regions
        gc.collect()
        assert set(cudart.registered) == {viewed}
        assert cudart.synchronized == [1]
        assert not is_mapped(other)
        del view
        assert cudart.registered == {}

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
        other_device, _ = prepare_regions([MIB], device=0)
        assert cudart.registered.keys() >= {viewed, *others}
        for number in range(3):
            regions, _ = prepare_regions([MIB] * 2, device=1)
            assert cudart.synchronized == [1] * (number + 1)
            assert set(cudart.registered) == {viewed, other_device[0].address, *(region.address for region in regions)}
            del regions
        del view
        regions, _ = prepare_regions([MIB], device=1)
        for region in (*regions, *other_device):
            region.unregister()
        assert cudart.registered == {}
        assert Mapping.dropped == []

    def test_registered_when_the_interpreter_ends(self):
        ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_child_does_not_share_the_pages(self):
        region = HostRegion(MIB)
        region.tensor.fill_(5)
        child = os.fork()
        if child == 0:  # zeros (wiped) or a fault (not inherited on old kernels), but never the parent's bytes
            os._exit(int(ctypes.string_at(region.address, 1) == b"\x05"))
        assert os.waitpid(child, 0)[1] != 256
        assert region.tensor[0].item() == 5


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("?", None)])
def test_numa_node_of_a_device(tmp_path, text, node, monkeypatch):
    root = write(tmp_path, {"sys/bus/pci/devices/0000:1b:00.0/numa_node": text})
    assert pci_numa_node("0000:1B:00.0", root=root) == node
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(host_memory, "pci_numa_node", lambda pci_id: pci_id)
    assert host_memory.gpu_numa_node(0) == "0000:1b:00.0"


def test_page_cache_in_use_is_available_to_growth_and_not_to_the_default(tmp_path):
    """A mapped data set that is read again and again is active page cache, which the kernel reclaims all the same."""
    two = meminfo(256, 200) | {"proc/self/cgroup": "0::/pod\n"} | cgroup2("/pod", str(64 * GIB), 60, cache_gib=5)
    two["sys/fs/cgroup/pod/memory.stat"] = f"inactive_file {5 * GIB}\nactive_file {40 * GIB}\n"
    base = "sys/fs/cgroup/memory/pod"
    one = meminfo(256, 200) | {
        "proc/self/cgroup": "4:memory:/pod\n",
        f"{base}/memory.limit_in_bytes": f"{64 * GIB}\n",
        f"{base}/memory.usage_in_bytes": f"{60 * GIB}\n",
        f"{base}/memory.stat": f"active_file 1\ntotal_inactive_file {5 * GIB}\ntotal_active_file {40 * GIB}\n",
    }
    for name, files in (("one", one), ("two", two)):
        root = write(tmp_path / name, files)
        assert available_host_bytes(root) == 49 * GIB
        assert safe_host_bytes(1, root=root).available_bytes == 9 * GIB

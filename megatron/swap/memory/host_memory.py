"""Host memory from the operating system: the bytes that are safe to reserve, and pages made ready for copies.

All sizes are bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.swap.common.log import logger
from megatron.swap.common.rounding import round_down
from megatron.swap.common.types import GIB, MIB, SwapError, UsageError, format_bytes
from megatron.swap.memory.mapping import Mapping, release_dropped
from megatron.swap.native.cuda_library import clear_cuda_error

PAGE_BYTES = 4096
TOUCH_BYTES = 64 * MIB  # touched by one thread at a time
REGISTER_THREADS = 4  # that register touched regions with CUDA


class HostMemoryError(SwapError):
    """Host memory, or its limit, is too small. The message has the figures and the flag to change."""


@dataclass(frozen=True)
class HostCapacity:
    """The host memory that one rank may reserve. All figures but ``safe_bytes`` are for the whole host."""

    total_bytes: int  # physical memory (MemTotal)
    available_bytes: int  # left in the machine's memory and below the limit of each cgroup of this process
    cgroup_limit_bytes: int | None  # the lowest limit of a cgroup; None if no cgroup has a limit
    safe_bytes: int  # a rank's default: (available_bytes - headroom_bytes) / local_world_size
    reason: str  # the computation of safe_bytes, for messages
    headroom_bytes: int = 0  # left unreserved
    local_world_size: int = 1  # ranks on this host

    def less(self, num_bytes: int, name: str) -> HostCapacity:
        """Return the capacity that remains when every rank takes ``num_bytes`` more, for ``name``."""
        return replace(
            self,
            available_bytes=max(0, self.available_bytes - num_bytes * self.local_world_size),
            safe_bytes=round_down(max(0, self.safe_bytes - num_bytes), PAGE_BYTES),
            reason=f"{self.reason}; less {format_bytes(num_bytes)} a rank for {name}",
        )


def local_world_size() -> int:
    """Return the number of ranks on this host, as the launcher says; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def safe_host_bytes(local_world_size: int, *, root: Path = Path("/")) -> HostCapacity:
    """Measure the host memory that each of the ``local_world_size`` ranks of this host can safely reserve.

    Every rank must call this before any rank reserves memory: reserved memory counts as unavailable. ``root`` replaces
    "/" in tests. Raises a ``HostMemoryError`` if /proc/meminfo cannot be read.
    """
    total_bytes, available_bytes = _physical_memory(root)
    reason = f"{format_bytes(total_bytes)} of memory, {format_bytes(available_bytes)} available"
    usable_bytes = total_bytes
    cgroup_limit_bytes = None
    for limit_bytes, left_bytes in _cgroup_limits(root):
        if cgroup_limit_bytes is None or limit_bytes < cgroup_limit_bytes:
            cgroup_limit_bytes = limit_bytes
        usable_bytes = min(usable_bytes, limit_bytes)
        if left_bytes < available_bytes:
            available_bytes = left_bytes
            reason += f"; cgroup limit {format_bytes(limit_bytes)} with {format_bytes(left_bytes)} left"
    # Memory that is allocated later: page cache of the data set, data loader workers, communication buffers, a
    # checkpoint being staged. A quarter at most, so that a laptop of 8 GiB has memory left for swapping.
    headroom_bytes = min(max(4 * GIB, usable_bytes // 10), usable_bytes // 4)
    safe_bytes = round_down(max(0, available_bytes - headroom_bytes) // local_world_size, PAGE_BYTES)
    reason += f"; less a headroom of {format_bytes(headroom_bytes)}"
    if local_world_size > 1:
        reason += f"; shared by {local_world_size} ranks, each"
    reason += f": {format_bytes(safe_bytes)}"
    return HostCapacity(
        total_bytes, available_bytes, cgroup_limit_bytes, safe_bytes, reason, headroom_bytes, local_world_size
    )


def memory_gib_of(device: torch.device, emulated_gib: float | None = None) -> float:
    """Return the memory of a GPU in GiB; of the CPU, what this process may use, at most ``emulated_gib``."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    host = safe_host_bytes(1)
    machine_gib = min(host.total_bytes, host.cgroup_limit_bytes or host.total_bytes) / GIB
    return min(machine_gib, emulated_gib or machine_gib)


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that this process can take now, of the machine and below the limits of its cgroups."""
    _, available_bytes = _physical_memory(root)
    # The whole page cache counts as available: the kernel reclaims it before it refuses memory.
    limits = _cgroup_limits(root, cache=("inactive_file", "active_file"))
    return min([available_bytes, *(left_bytes for _, left_bytes in limits)])


def check_host_request(requested_bytes: int, capacity: HostCapacity, unchecked: bool) -> None:
    """Raise a ``HostMemoryError`` if a request exceeds a rank's equal part of the memory, unless ``unchecked``."""
    if requested_bytes <= 0:
        raise UsageError(f"--swap-host-gib must be greater than 0, got {requested_bytes / GIB:g}")
    # The headroom is for the default only: a user who gives a number may use the headroom too.
    share_bytes = capacity.available_bytes // capacity.local_world_size
    if unchecked or requested_bytes <= share_bytes:
        return
    ranks = capacity.local_world_size
    together = f" on each of {ranks} ranks ({format_bytes(requested_bytes * ranks)} in all)" if ranks > 1 else ""
    raise HostMemoryError(
        f"--swap-host-gib asks for {format_bytes(requested_bytes)} of host memory{together}, but only "
        f"{format_bytes(share_bytes)} a rank are available ({capacity.reason}). Lower --swap-host-gib to at most "
        f"{share_bytes / GIB:.1f} ({capacity.safe_bytes / GIB:.1f} is safe), or swap fewer layers (--swap-layers). For "
        "a machine whose memory grows on demand, --swap-host-unchecked ends this check."
    )


def _physical_memory(root: Path) -> tuple[int, int]:
    """Return MemTotal and MemAvailable, in bytes."""
    path = root / "proc/meminfo"
    try:
        kib = _numbers(path)
        total_kib = kib["MemTotal"]
    except (OSError, KeyError) as error:
        raise HostMemoryError(f"cannot read the size of the host memory from {path}: {error!r}") from error
    # Kernels before 3.14 and some sandboxes have no MemAvailable: free memory and page cache approximate it.
    fallback_kib = kib.get("MemFree", 0) + kib.get("Buffers", 0) + kib.get("Cached", 0)
    return total_kib * 1024, min(total_kib, kib.get("MemAvailable", fallback_kib)) * 1024


def _cgroup_limits(root: Path, cache: Sequence[str] = ("inactive_file",)) -> list[tuple[int, int]]:
    """Return (limit, bytes left) of this process's cgroups. Page cache of the kinds ``cache`` counts as left."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount, limit_name, usage_name, prefix = "", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            mount, prefix = "memory", "total_"
            limit_name, usage_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # In a container /proc/self/cgroup may give the host's path, but only the own cgroup is mounted, at the
        # mount's root. So walk up from the path, and skip folders that do not exist.
        for depth in range(len(parts), -1, -1):
            folder = (root / "sys/fs/cgroup" / mount).joinpath(*parts[:depth])
            limit_bytes = _read_int(folder / limit_name)
            # "max" (v2) reads as None; v1 spells "no limit" as the largest multiple of a page in 63 bits.
            if limit_bytes is None or limit_bytes >= 1 << 60:
                continue
            used_bytes = _read_int(folder / usage_name) or 0
            with suppress(OSError):
                stat = _numbers(folder / "memory.stat")
                used_bytes = max(0, used_bytes - sum(stat.get(f"{prefix}{name}", 0) for name in cache))
            limits.append((limit_bytes, max(0, limit_bytes - used_bytes)))
    return limits


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, int]:
    """Return the number behind each name in a file of the kernel."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


@dataclass(frozen=True)
class PrepareTimes:
    """The seconds that ``prepare_regions`` took."""

    total_s: float
    touch_s: float  # until the last page was touched
    register_s: float  # in cudaHostRegister, the sum over all threads


class HostRegion:
    """A mapping registered with CUDA as a whole, so that any range of it can be one copy, while tensors on it live."""

    def __init__(self, nbytes: int, *, numa_node: int | None = None) -> None:
        self._mapping = Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
            self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)  # all bytes
        self.nbytes = nbytes
        self.address = self._mapping.address = self.tensor.data_ptr()
        libc = _libc()
        # fork() copies pinned pages at once, since a page that a device writes to cannot be shared. So every data
        # loader worker would copy the pool. A child reads zeros instead and needs no more.
        if libc.madvise(self.address, nbytes, _MADV_WIPEONFORK) != 0:
            libc.madvise(self.address, nbytes, mmap.MADV_DONTFORK)
        libc.madvise(self.address, nbytes, mmap.MADV_HUGEPAGE)  # best effort: fewer faults, faster registration
        # The first touch places a page, so the node is set before any touch.
        self.near_node = numa_node is not None and _prefer_node(self.address, nbytes, numa_node)

    def touch(self, start: int, end: int) -> float:
        """Make the bytes from ``start`` to ``end`` resident. Return the time at the end."""
        self.tensor[start:end:PAGE_BYTES].fill_(0)
        return time.perf_counter()

    def register(self, device: int) -> None:
        """Register the whole region with CUDA device number ``device``, or raise a ``HostMemoryError``."""
        # The current device of a new thread is 0. Registering there would create a context on another rank's GPU.
        torch.cuda.set_device(device)
        status = torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, _CUDA_HOST_REGISTER_PORTABLE)
        if int(status) != 0:
            clear_cuda_error()
            raise HostMemoryError(
                f"cudaHostRegister refused {format_bytes(self.nbytes)} of host memory "
                f"(CUDA error {int(status)}). Lower --swap-host-gib or swap fewer layers (--swap-layers)."
            )
        self._mapping.device = device

    def unregister(self) -> None:
        """Undo ``register``, if it was called. No copy may be under way on the region."""
        self._mapping.unregister()


def prepare_regions(sizes: Sequence[int], *, device: int | None) -> tuple[list[HostRegion], PrepareTimes]:
    """Map regions of the given sizes in bytes, or raise a ``HostMemoryError`` and leave none.

    They are placed near CUDA ``device``, touched and registered; without it, pages are left to their first use.
    """
    start, numa_node = time.perf_counter(), None
    if device is not None:
        numa_node = gpu_numa_node(device)
        release_dropped(device)  # CUDA refuses to map where a dropped mapping is registered
    # Touching scales with threads, and registering far less. So both run at once: touching threads take the regions in
    # order, and registering threads follow one region behind.
    touchers = ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0))), "swap-touch")
    registrars = ThreadPoolExecutor(REGISTER_THREADS, "swap-register")
    regions: list[HostRegion] = []
    try:
        # All mappings before any touch: mmap and madvise need the address space's lock alone, page faults share it.
        for nbytes in sizes:
            regions.append(HostRegion(nbytes, numa_node=numa_node))
        if numa_node is not None and not all(region.near_node for region in regions):
            logger.debug("pages cannot be placed on NUMA node %d: the system refuses", numa_node)
        ready = []
        for region in regions:
            if device is None:
                break
            touches = [
                touchers.submit(region.touch, start, min(start + TOUCH_BYTES, region.nbytes))
                for start in range(0, region.nbytes, TOUCH_BYTES)
            ]
            ready.append(registrars.submit(_register_after, region, touches, device))
        finished = [future.result() for future in ready]  # waits for all threads, and raises their first error
    except BaseException as error:
        for pool in (touchers, registrars):
            pool.shutdown(wait=True, cancel_futures=True)
        for region in regions:
            region.unregister()
        if isinstance(error, OSError):
            raise HostMemoryError(
                f"the system refused {format_bytes(sum(sizes))} of host memory ({error}). "
                "Lower --swap-host-gib or swap fewer layers (--swap-layers)."
            ) from error
        raise
    touchers.shutdown()
    registrars.shutdown()
    touched_at = max((done for done, _ in finished), default=start)
    times = PrepareTimes(time.perf_counter() - start, max(0.0, touched_at - start), sum(s for _, s in finished))
    return regions, times


def _register_after(region: HostRegion, touches: list[Future[float]], device: int) -> tuple[float, float]:
    """Register ``region`` once it is touched. Return the time of the last touch and the seconds of registering."""
    touched_at = max(touch.result() for touch in touches)
    start = time.perf_counter()
    region.register(device)
    return touched_at, time.perf_counter() - start


def gpu_numa_node(device: int) -> int | None:
    """Return the NUMA node of CUDA device number ``device``, or None if the system does not say."""
    properties: Any = torch.cuda.get_device_properties(device)
    pci_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return pci_numa_node(pci_id)


def pci_numa_node(pci_id: str, *, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of PCI device ``pci_id`` ("0000:1b:00.0"); ``None`` if unknown."""
    node = _read_int(root / "sys/bus/pci/devices" / pci_id.lower() / "numa_node")
    return node if node is not None and node >= 0 else None  # hosts with one node say -1


_MADV_WIPEONFORK = 18
_MPOL_PREFERRED = 1
_CUDA_HOST_REGISTER_PORTABLE = 1  # pinned for every context of the process, not only the registering context
_MBIND_SYSCALL = {"x86_64": 237, "aarch64": 235}


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)  # a function called through CDLL runs without the GIL
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.syscall.restype = ctypes.c_long
    return libc


def _prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Place the range's pages on ``node``, or elsewhere when ``node`` is full."""
    number = _MBIND_SYSCALL.get(platform.machine())
    if number is None:
        return False
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    num_words = node // bits + 1
    mask = (ctypes.c_ulong * num_words)()
    mask[node // bits] = 1 << (node % bits)
    status = _libc().syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_ulong(_MPOL_PREFERRED), mask,
        ctypes.c_ulong(num_words * bits + 1), ctypes.c_ulong(0),
    )  # fmt: skip
    return bool(status == 0)

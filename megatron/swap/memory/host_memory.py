"""Host memory from the operating system: how much is safe to reserve, and how pages are made ready.

* The capacity: ``safe_host_bytes`` reads /proc/meminfo and the cgroup files, ``check_host_request`` judges a request.
* The pages: ``HostRegion`` maps, touches and registers one block of memory. ``prepare_regions`` does so for many at
  once: some threads touch blocks while others register the blocks that are touched already.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.swap.common.rounding import round_down
from megatron.swap.common.types import GIB, MIB, SwapError, UsageError, format_bytes
from megatron.swap.memory.mapping import Mapping, release_dropped
from megatron.swap.native.cuda_library import clear_cuda_error

PAGE_BYTES = 4096


class HostMemoryError(SwapError):
    """Host memory, or its limit, is too small. The message has the figures and the flag to change."""


# ------------------------------------------------------------------------------------------------------------
# The capacity
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostCapacity:
    """The host memory that one rank may reserve. All figures but ``safe_bytes`` are for the whole host.

    Attributes:
        total_bytes: physical memory (MemTotal).
        available_bytes: can still be allocated, within the machine's memory and every cgroup above this process.
        cgroup_limit_bytes: the lowest cgroup limit; None: there is none.
        safe_bytes: the default of one rank: (``available_bytes`` - ``headroom_bytes``) / ``local_world_size``.
        reason: how ``safe_bytes`` was computed, for messages.
        headroom_bytes: left unreserved.
        local_world_size: ranks on this host.
    """

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    safe_bytes: int
    reason: str
    headroom_bytes: int = 0
    local_world_size: int = 1

    def less(self, num_bytes: int, name: str) -> HostCapacity:
        """Return the capacity that remains when every rank takes ``num_bytes`` more, for ``name``."""
        return replace(
            self,
            available_bytes=max(0, self.available_bytes - num_bytes * self.local_world_size),
            safe_bytes=round_down(max(0, self.safe_bytes - num_bytes), PAGE_BYTES),
            reason=f"{self.reason}; less {format_bytes(num_bytes)} a rank for {name}",
        )


def local_world_size() -> int:
    """Return the number of ranks on this host, from the launcher's environment variable; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def safe_host_bytes(local_world_size: int, *, root: Path = Path("/")) -> HostCapacity:
    """Measure how much host memory each of the ``local_world_size`` ranks of this host can safely reserve.

    That is (available memory - headroom) / ranks. The headroom is for memory that is allocated after this call: the
    page cache of the data set, data loader workers, communication buffers, a checkpoint being staged. It is the larger
    of 4 GiB and 10 % of the memory that this process may use, but at most a quarter of it, so that an 8 GiB laptop has
    memory left for swapping. Every rank must call this before any rank reserves memory. Otherwise the memory of the
    first rank counts as unavailable to the others.

    Args:
        root: replaces "/" in tests.

    Raises:
        ValueError: ``local_world_size`` is below 1.
        HostMemoryError: /proc/meminfo cannot be read.
    """
    if local_world_size < 1:
        raise ValueError(f"local_world_size must be at least 1, got {local_world_size}")
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
    headroom_bytes = min(max(4 * GIB, usable_bytes // 10), usable_bytes // 4)
    safe_bytes = round_down(max(0, available_bytes - headroom_bytes) // local_world_size, PAGE_BYTES)
    reason += f"; less a headroom of {format_bytes(headroom_bytes)}"
    if local_world_size > 1:
        reason += f"; shared by {local_world_size} ranks, each"
    reason += f": {format_bytes(safe_bytes)}"
    return HostCapacity(
        total_bytes, available_bytes, cgroup_limit_bytes, safe_bytes, reason, headroom_bytes, local_world_size
    )


def machine_memory_gib() -> float:
    """Return the memory of this machine that this process may use, in GiB. It stands for a device's on the CPU."""
    host = safe_host_bytes(1)
    return min(host.total_bytes, host.cgroup_limit_bytes or host.total_bytes) / GIB


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that this process can take now: of the machine, and below the limits of its cgroups.

    The whole page cache counts as available: the kernel reclaims it before it refuses memory.
    """
    _, available_bytes = _physical_memory(root)
    limits = _cgroup_limits(root, cache=("inactive_file", "active_file"))
    return min([available_bytes, *(left_bytes for _, left_bytes in limits)])


def check_host_request(requested_bytes: int, capacity: HostCapacity, unchecked: bool) -> None:
    """Refuse a request of one rank that the host cannot hold.

    The limit is an equal part of the available memory, headroom included: the headroom is for the default, and a user
    who gives a number may use it.

    Args:
        unchecked: accept every positive request, for machines whose reported memory starts small and grows on demand.

    Raises:
        UsageError: the request is not positive.
        HostMemoryError: the request is too large.
    """
    if requested_bytes <= 0:
        raise UsageError(f"--swap-host-gib must be greater than 0, got {requested_bytes / GIB:g}")
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
    fields = {}
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if value.split():
                fields[name] = int(value.split()[0]) * 1024
        total_bytes = fields["MemTotal"]
        # Kernels before 3.14 and some sandboxes have no MemAvailable: free memory and page cache approximate it.
        fallback_bytes = fields.get("MemFree", 0) + fields.get("Buffers", 0) + fields.get("Cached", 0)
    except (OSError, ValueError, KeyError) as error:
        raise HostMemoryError(f"cannot read the size of the host memory from {path}: {error!r}") from error
    return total_bytes, min(total_bytes, fields.get("MemAvailable", fallback_bytes))


def _cgroup_limits(root: Path, cache: Sequence[str] = ("inactive_file",)) -> list[tuple[int, int]]:
    """Return (limit, bytes left below it) of every cgroup with a memory limit between this process and the root.

    Page cache of the kinds ``cache`` counts as left.

    Inside a container /proc/self/cgroup may give the host's path although only the container's own cgroup is mounted,
    at the mount's root. The loop walks up from the path and skips folders that do not exist, so it works for both.
    """
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
            mount, limit_name, usage_name = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = (root / "sys/fs/cgroup" / mount).joinpath(*parts[:depth])
            limit_bytes = _read_int(folder / limit_name)
            # "max" (v2) reads as None; v1 spells "no limit" as the largest multiple of a page in 63 bits.
            if limit_bytes is None or limit_bytes >= 1 << 60:
                continue
            used_bytes = _read_int(folder / usage_name) or 0
            cache_bytes = sum(_read_stat(folder / "memory.stat", f"{prefix}{name}") for name in cache)
            used_bytes -= min(used_bytes, cache_bytes)
            limits.append((limit_bytes, max(0, limit_bytes - used_bytes)))
    return limits


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


# ------------------------------------------------------------------------------------------------------------
# The pages
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PinStrategy:
    """Method that makes fresh memory ready.

    Attributes:
        touch: "pages" writes one byte a page; "populate" asks the kernel (MADV_POPULATE_WRITE, Linux 5.14) and falls
            back to "pages"; "memset" writes every byte; "none": pages become resident at registration or first use.
        touch_threads: None: min(16, usable cores).
        register_threads: threads that register touched regions with CUDA.
        huge_pages: ask for transparent huge pages.
        chunk_bytes: touched by one thread at a time.
    """

    touch: Literal["pages", "populate", "memset", "none"] = "pages"
    touch_threads: int | None = None
    register_threads: int = 4
    huge_pages: bool = True
    chunk_bytes: int = 64 * MIB


@dataclass(frozen=True)
class PrepareTimes:
    """Seconds in total, until the last page was touched, and in cudaHostRegister (the sum over all threads)."""

    total_s: float
    touch_s: float
    register_s: float


class HostRegion:
    """One private anonymous mapping, registered with CUDA as a whole: any range of it can be one copy.

    The mapping lives as long as the region, ``tensor`` or a view of it, and is then unregistered and unmapped.

    Attributes:
        tensor: all bytes, uint8.
        nbytes: their number.
        address: of the first one.
        near_node: whether the pages are placed on ``numa_node``.

    Raises:
        OSError: the address space is exhausted.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool, numa_node: int | None) -> None:
        self._mapping = Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
            self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.nbytes = nbytes
        self.address = self._mapping.address = self.tensor.data_ptr()
        libc = _libc()
        # fork() copies pinned pages at once (a page that a device writes to cannot be shared copy-on-write):
        # every data loader worker would duplicate the pool. A child sees zeros instead and needs no more.
        if libc.madvise(self.address, nbytes, _MADV_WIPEONFORK) != 0:
            libc.madvise(self.address, nbytes, mmap.MADV_DONTFORK)
        if huge_pages:
            # Best effort: fewer faults, faster registration.
            libc.madvise(self.address, nbytes, mmap.MADV_HUGEPAGE)
        # Pages are placed by their first touch, so this comes before it.
        self.near_node = numa_node is not None and _prefer_node(self.address, nbytes, numa_node)

    def touch(self, offset: int, nbytes: int, how: str) -> float:
        """Make [offset, offset + nbytes) resident, without the GIL. Returns the time at its end.

        Args:
            how: as ``PinStrategy.touch``.
        """
        if how == "populate" and _libc().madvise(self.address + offset, nbytes, _MADV_POPULATE_WRITE) != 0:
            how = "pages"
        if how == "pages":
            self.tensor[offset : offset + nbytes : PAGE_BYTES].fill_(0)
        elif how == "memset":
            ctypes.memset(self.address + offset, 0, nbytes)
        return time.perf_counter()

    def register(self, device: int) -> None:
        """Register the whole region for copies with CUDA device number ``device``.

        Raises:
            HostMemoryError: CUDA refuses.
        """
        # A new thread's current device is 0; registering there would create a context on another rank's GPU.
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


def prepare_regions(
    sizes: Sequence[int], *, strategy: PinStrategy, device: int | None, numa_node: int | None
) -> tuple[list[HostRegion], PrepareTimes]:
    """Map, touch and register regions of the given sizes in bytes; all of them or none.

    Touching scales with threads, registering far less, so the two overlap: the touching threads work through the
    regions in order, and the registering threads follow one region behind.

    Args:
        device: index of the CUDA device to register for; None: do not register.
        numa_node: where pages are placed if possible; None: anywhere.

    Raises:
        HostMemoryError: the system or CUDA refuses. No region is left mapped or registered.
    """
    start = time.perf_counter()
    if device is not None:
        release_dropped(device)
    touch_threads = strategy.touch_threads or min(16, len(os.sched_getaffinity(0)))
    touchers = ThreadPoolExecutor(touch_threads, "swap-touch")
    registrars = ThreadPoolExecutor(strategy.register_threads, "swap-register")
    regions: list[HostRegion] = []
    try:
        # Every mapping first: mmap and madvise take the address space's lock for themselves, faults share it.
        for nbytes in sizes:
            regions.append(HostRegion(nbytes, huge_pages=strategy.huge_pages, numa_node=numa_node))
        ready = []
        for region in regions:
            touches = []
            if strategy.touch != "none":
                for offset in range(0, region.nbytes, strategy.chunk_bytes):
                    nbytes = min(strategy.chunk_bytes, region.nbytes - offset)
                    touches.append(touchers.submit(region.touch, offset, nbytes, strategy.touch))
            ready.append(registrars.submit(_register_after, region, touches, device))
        finished = [future.result() for future in ready]
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


def _register_after(region: HostRegion, touches: list[Future[float]], device: int | None) -> tuple[float, float]:
    """Register ``region`` once it is touched. Returns the time of the last touch, and the seconds of registering."""
    touched_at = max((touch.result() for touch in touches), default=0.0)
    start = time.perf_counter()
    if device is not None:
        region.register(device)
    return touched_at, time.perf_counter() - start


def gpu_numa_node(device: int) -> int | None:
    """Return the NUMA node that CUDA device number ``device`` is attached to; None when the system does not say."""
    properties: Any = torch.cuda.get_device_properties(device)
    pci_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return pci_numa_node(pci_id)


def pci_numa_node(pci_id: str, *, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of PCI device ``pci_id`` ("0000:1b:00.0"); None when unknown (one-node hosts say -1)."""
    node = _read_int(root / "sys/bus/pci/devices" / pci_id.lower() / "numa_node")
    return node if node is not None and node >= 0 else None


_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23
_MPOL_PREFERRED = 1
_CUDA_HOST_REGISTER_PORTABLE = 1  # pinned for every context of the process, not only the one that registers
_MBIND_SYSCALL = {"x86_64": 237, "aarch64": 235}


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)  # a function called through CDLL runs without the GIL
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.syscall.restype = ctypes.c_long
    return libc


def _prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Place the range's pages on ``node``, or elsewhere when it is full: a strict binding would kill the process."""
    number = _MBIND_SYSCALL.get(platform.machine())
    if number is None:
        return False
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    num_words = node // bits + 1
    mask = (ctypes.c_ulong * num_words)()
    mask[node // bits] = 1 << (node % bits)
    status = _libc().syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_ulong(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(num_words * bits + 1),
        ctypes.c_ulong(0),
    )
    return bool(status == 0)

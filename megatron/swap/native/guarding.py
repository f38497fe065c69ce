"""The native core of the out-of-memory guard for each kind of device, or the error why it cannot be made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import CDLL
from typing import Protocol, cast

from megatron.swap.common.types import UsageError
from megatron.swap.native.build import BuildError, load
from megatron.swap.native.cuda_allocator import MAKE_ROOM, REPORT, load_cuda_allocator
from megatron.swap.native.cuda_library import loaded_cuda_library

NEEDS = "--swap-oom-guard needs"

Piece = tuple[int, int]
"""Address and size in bytes of a piece of host memory."""


class NativeRescue(Protocol):
    """An allocation that failed and was retried after an eviction; ``engine.oom_guard.Rescue`` explains the fields."""

    wanted_bytes: int
    freed_bytes: int
    copied_bytes: int
    held_bytes: int
    ms: float
    groups: Sequence[int]


class Flag(Protocol):
    """An event of the emulated device for native code. It must live as long as its address is in use."""

    address: int

    def raise_(self) -> None: ...


class GuardCore(Protocol):
    """The core in ``native/guard.h``: evicts offered storages when an allocation fails, on any thread, without Python.

    A storage is passed as ``untyped_storage()._cdata``, an event as its address.
    """

    def begin(self) -> None:
        """Rescue allocations from now on."""

    def end(self) -> None:
        """Stop rescuing allocations. Offers remain until they are withdrawn."""

    def pause_here(self, pause: bool) -> None:
        """Pause the guard on this thread, or resume it. A paused guard rescues no allocation."""

    def offer(
        self, key: int, storage_impl: int, num_bytes: int, num_owners: int, next_use: int, is_copied: bool,
        event: int, group: int,
    ) -> None:  # fmt: skip
        """Allow the eviction of a storage until ``withdraw``, under the number ``key``.

        Args:
            num_owners: the caller's references to the storage; a storage with more is not evicted.
            next_use: the higher the later. Storages that need no copy are evicted first, then the others; within each,
                the one with the latest use first.
            is_copied: the host has the bytes once ``event`` has passed; else the eviction copies them first.
            event: passes before the memory may be copied or released; it must live until the offer is withdrawn.
            group: storages of one group are evicted together; returned in the rescues.
        """

    def withdraw(self, key: int) -> list[Piece] | None:
        """End an offer. ``None``: it was not evicted. Else the host memory of its bytes; empty if ``is_copied``."""

    def release(self, pieces: Iterable[Piece]) -> None:
        """Return host memory of evicted bytes to the guard, when no copy reads it any more."""

    def take_evicted(self) -> list[int]:
        """Return the keys of offers that were evicted and not withdrawn, each once."""

    def num_evictions(self) -> int:
        """Return the number of calls so far that evicted storages."""

    def take_rescues(self) -> list[NativeRescue]:
        """Return the rescues since the last call."""

    def set_most_host_bytes(self, num_bytes: int) -> None:
        """Limit the host memory that is mapped."""

    def mapped_bytes(self) -> int:
        """Return the host memory that is mapped now in bytes."""

    def pin(self) -> None:
        """Register the mapped memory with CUDA, so that copies are fast."""

    def report(self) -> str:
        """Return what the guard holds and its last error, for the message of an allocation that it could not rescue."""


class _Native(Protocol):
    Flag: type[Flag]

    def Guard(self, most_host_bytes: int, *cuda: object) -> GuardCore: ...
    def is_any_guard_in_force(self) -> bool: ...
    def limit_ram(self, num_bytes: int) -> None: ...
    def unlimit_ram(self) -> None: ...
    def ram_in_use(self) -> int: ...
    def ram_peak(self) -> int: ...
    def make_room_address(self) -> int: ...
    def report_address(self) -> int: ...


def native(needs: str = NEEDS) -> _Native:
    """Return the C++ part.

    Args:
        needs: the beginning of the error message: the feature that needs it.

    Raises:
        UsageError: it cannot be built here, or is not wanted.
    """
    found = load()
    if found is None:
        raise UsageError(
            f"{needs} the C++ part of this package, which is built on first use: there is no compiler here (g++, c++, "
            "clang++ or CXX), it failed (see the warning), or MEGATRON_SWAP_NATIVE=0 is set. Leave it out, or install "
            "a compiler."
        )
    return cast(_Native, found)


def build_guard(on_gpu: bool) -> None:
    """Build the libraries that a guard needs.

    Raises:
        UsageError: they cannot be built here; the message says why.
    """
    native()
    if on_gpu:
        _cuda_allocator()


def _cuda_allocator() -> CDLL:
    try:
        return load_cuda_allocator()
    except BuildError as error:
        raise UsageError(f"{NEEDS} a C++ library that wraps PyTorch's allocator: {error}. Leave it out.") from error


def new_guard(*cuda: object) -> GuardCore:
    """Make the core for the emulated device, or with the arguments of ``cuda_guard`` for a CUDA device.

    Raises:
        UsageError: the C++ part cannot be built here, or this process has a guard already.
    """
    if native().is_any_guard_in_force():
        raise UsageError(
            "an out-of-memory guard is at work in this process already (--swap-oom-guard), and there can be one at a "
            "time. Close what opened it first, or open this one without."
        )
    return native().Guard(0, *cuda)


def cuda_guard(device: int, stream: int, done: int) -> GuardCore:
    """Make the core for CUDA device number ``device``, and let the device's allocator call it.

    Args:
        stream, done: addresses of a stream and an event that only the guard uses.

    Raises:
        UsageError: the C++ part or CUDA's runtime is missing here, or this process has a guard already.
    """
    cuda_library = loaded_cuda_library()
    if cuda_library is None:
        raise UsageError(f"{NEEDS} libcudart as a library of its own, and this PyTorch has loaded none. Leave it out.")
    try:
        core = new_guard(cuda_library, device, stream, done)
    except RuntimeError as error:
        raise UsageError(f"{NEEDS} CUDA's runtime: {error}. Leave it out.") from error
    library = _cuda_allocator()
    make_room, report = MAKE_ROOM(native().make_room_address()), REPORT(native().report_address())
    refusal = library.megatron_swap_cuda_install(make_room, report)
    if refusal is not None:
        raise UsageError(f"{NEEDS} PyTorch's own CUDA allocator: {refusal.decode()}. Leave it out, or that allocator.")
    return core


def stop_watching_allocator() -> None:
    """Undo ``cuda_guard``: PyTorch's CUDA allocator no longer calls a guard."""
    load_cuda_allocator().megatron_swap_cuda_remove()

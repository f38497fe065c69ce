"""The native part of the out-of-memory guard, for each kind of device, and why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import CDLL
from typing import Protocol, cast

from megatron.swap.native.build import BuildError, load
from megatron.swap.native.cuda_allocator import MAKE_ROOM, REPORT, load_cuda_allocator
from megatron.swap.native.cuda_library import loaded_cuda_library
from megatron.swap.types import UsageError

NEEDS = "--swap-oom-guard needs"

Piece = tuple[int, int]
"""Address and bytes of host memory."""


class NativeRescue(Protocol):
    """What was done for an allocation that had failed."""

    wanted_bytes: int
    freed_bytes: int
    copied_bytes: int
    held_bytes: int
    ms: float
    groups: Sequence[int]


class Flag(Protocol):
    """An event of a device that threads play. It lives as long as anybody may ask for it by its address."""

    address: int

    def raise_(self) -> None: ...


class GuardCore(Protocol):
    """``native/guard.h``. A storage is given by ``untyped_storage()._cdata``, an event by its address."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def pause_here(self, pause: bool) -> None:
        """On this thread allocations fail as if there were no guard, until told otherwise."""

    def offer(
        self, key: int, storage_impl: int, num_bytes: int, num_owners: int, next_use: int, is_copied: bool,
        event: int, group: int,
    ) -> None: ...  # fmt: skip
    def claim(self, key: int) -> list[Piece] | None: ...
    def give_back(self, pieces: Iterable[Piece]) -> None: ...
    def take_evicted(self) -> list[int]: ...
    def num_evictions(self) -> int: ...
    def take_rescues(self) -> list[NativeRescue]: ...
    def set_most_host_bytes(self, num_bytes: int) -> None: ...
    def mapped_bytes(self) -> int: ...
    def pin(self) -> None: ...
    def report(self) -> str: ...


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
    """The C++. ``needs``: who does.

    Raises:
        UsageError: it cannot be built here, or is not wanted.
    """
    found = load()
    if found is None:
        raise UsageError(
            f"{needs} the C++ part of this package, which is built on first use: there is no compiler here (g++, c++, "
            "clang++ or CXX), it failed (see the warning), or MEGATRON_SWAP_NATIVE=0 is set. Drop the flag, or install "
            "a compiler."
        )
    return cast(_Native, found)


def build_guard(on_gpu: bool) -> None:
    """Build what a guard needs.

    Raises:
        UsageError: that is not possible here, and why.
    """
    native()
    if on_gpu:
        _cuda_allocator()


def _cuda_allocator() -> CDLL:
    try:
        return load_cuda_allocator()
    except BuildError as error:
        raise UsageError(f"{NEEDS} a library of ours behind PyTorch's allocator: {error}. Drop the flag.") from error


def new_guard(*cuda: object) -> GuardCore:
    """Of a device that RAM plays; or, by ``cuda_guard``, of a CUDA device.

    Raises:
        UsageError: there is none here, or one already.
    """
    if native().is_any_guard_in_force():
        raise UsageError(
            "an out-of-memory guard is at work in this process already (--swap-oom-guard, oom_guard=True), and there "
            "can be one at a time. Close what opened it first, or open this one without."
        )
    return native().Guard(0, *cuda)


def cuda_guard(device: int, stream: int, done: int) -> GuardCore:
    """For CUDA device number ``device``, whose allocator asks it from now on; stream and event (by address) are the
    guard's alone.

    Raises:
        UsageError: there is none here, or one already.
    """
    cuda_library = loaded_cuda_library()
    if cuda_library is None:
        raise UsageError(f"{NEEDS} libcudart as a library of its own, and this PyTorch has loaded none. Drop the flag.")
    try:
        core = new_guard(cuda_library, device, stream, done)
    except RuntimeError as error:
        raise UsageError(f"{NEEDS} CUDA's runtime: {error}. Drop the flag.") from error
    library = _cuda_allocator()
    make_room, report = MAKE_ROOM(native().make_room_address()), REPORT(native().report_address())
    refusal = library.megatron_swap_cuda_install(make_room, report)
    if refusal is not None:
        raise UsageError(f"{NEEDS} PyTorch's own CUDA allocator: {refusal.decode()}. Drop the flag, or that allocator.")
    return core


def stop_watching_allocator() -> None:
    """CUDA's allocator fails as it did before ``cuda_guard``."""
    load_cuda_allocator().megatron_swap_cuda_remove()

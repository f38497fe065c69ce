"""The native core of the out-of-memory guard for each kind of device, or the reason why it cannot be made."""

from __future__ import annotations

from ctypes import CDLL
from typing import Any

from megatron.swap.common.types import UsageError
from megatron.swap.native.build import BuildError, load
from megatron.swap.native.cuda_allocator import MAKE_ROOM, REPORT, load_cuda_allocator
from megatron.swap.native.cuda_library import loaded_cuda_library

NEEDS = "--swap-oom-guard needs"

Piece = tuple[int, int]  # address and size in bytes of a piece of host memory

# `Guard` of guard.h, which describes its methods. Storages are passed as `untyped_storage()._cdata`, events by address.
GuardCore = Any
Flag = Any  # `Flag` of machines.h: an event of the emulated device, at `address` while it lives


def native(needs: str = NEEDS) -> Any:
    """Return the C++ part, or raise a ``UsageError`` that begins with ``needs``, the feature."""
    found = load()
    if found is None:
        raise UsageError(
            f"{needs} the C++ part of this package, which is built on first use: there is no compiler here (g++, c++, "
            "clang++ or CXX), it failed (see the warning), or MEGATRON_SWAP_NATIVE=0 is set. Leave it out, or install "
            "a compiler."
        )
    return found


def build_guard(on_gpu: bool) -> None:
    """Build the libraries that a guard needs, or raise a ``UsageError``."""
    native()
    if on_gpu:
        _cuda_allocator()


def _cuda_allocator() -> CDLL:
    try:
        return load_cuda_allocator()
    except BuildError as error:
        raise UsageError(f"{NEEDS} a C++ library that wraps PyTorch's allocator: {error}. Leave it out.") from error


def new_guard(*cuda: object) -> GuardCore:
    """Make a core, with the arguments of ``cuda_guard`` for CUDA, or raise a ``UsageError``: no C++, or a second."""
    if native().is_any_guard_in_force():
        raise UsageError(
            "an out-of-memory guard is at work in this process already, of another run with a budget or with "
            "--swap-oom-guard, and there can be one at a time. Close that run first, or begin this one without."
        )
    return native().Guard(0, *cuda)


def cuda_guard(device: int, stream: int, done: int) -> GuardCore:
    """Make the core for CUDA device number ``device``, and let the device's allocator call it.

    Only the guard may use the stream and the event at the addresses ``stream`` and ``done``. Raises a ``UsageError``
    without the C++ part or CUDA's runtime, or if this process has a guard already.
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
    """Undo ``cuda_guard``."""
    load_cuda_allocator().megatron_swap_cuda_remove()

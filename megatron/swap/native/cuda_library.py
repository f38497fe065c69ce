"""Finds the CUDA runtime that this process has loaded, so that one build serves machines with and without CUDA."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path


def loaded_cuda_library() -> str | None:
    """Return the path of the CUDA runtime that torch loaded at import; ``None`` if there is none."""
    # Another copy of the runtime would not know torch's streams and events.
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libcudart"):
            return f"/{path}"
    return None


def clear_cuda_error() -> None:
    """Clear the last CUDA error of the calling thread, after a failed call that was handled."""
    # CUDA keeps the error with the thread, and PyTorch would report it as the failure of the next kernel.
    path = loaded_cuda_library()
    if path is not None:
        CDLL(path).cudaGetLastError()

"""The CUDA runtime that this process has loaded: one build of ours serves machines with and without CUDA."""

from __future__ import annotations

from pathlib import Path


def loaded_cuda_library() -> str | None:
    """Return the path of the CUDA runtime that this process has loaded; ``None`` where there is none.

    torch loads it at import. In a runtime of another path or version torch's streams and events would mean nothing.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libcudart"):
            return f"/{path}"
    return None

"""Builds and loads ``cuda_allocator.cpp``, which needs CUDA's headers and is written for torch's allocator classes.

torch's own packages have the runtime's headers, but not the folder ``crt/`` that these include. A toolkit has it, and
so has triton, which is installed with torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.swap.native.build import BuildError, Library, load_library

SOURCE = "cuda_allocator.cpp"
BASES = {
    "CUDAAllocator": "c10/cuda/CUDACachingAllocator.h",
    "DeviceAllocator": "c10/core/CachingDeviceAllocator.h",
    "Allocator": "c10/core/Allocator.h",
}
"""The base classes of our allocator, each derived from the next, and torch's header that declares it."""

MAKE_ROOM = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
REPORT = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)
"""Types of the two functions. Only tests may pass Python functions: these need the interpreter's lock, and can deadlock
with a thread that has it and waits for a lock of the allocating thread."""


@functools.cache
def load_cuda_allocator() -> ctypes.CDLL:
    """Return the library, and build it if needed. It changes nothing until one of its functions is called.

    ``megatron_swap_cuda_install(make_room, report)`` takes the addresses of two functions that live as long as the
    process; the second may be ``None``. It returns ``None``, or as bytes why it installed nothing.
    ``megatron_swap_cuda_remove()`` undoes it.

    Raises:
        BuildError: a header is missing, or this torch's allocator classes are not the ones that we know.
    """
    if os.environ.get("MEGATRON_SWAP_NATIVE") == "0":
        raise BuildError("MEGATRON_SWAP_NATIVE=0: nothing native is wanted")
    if torch.version.cuda is None:
        raise BuildError(f"torch {torch.__version__} is built without CUDA")
    headers = {name: Path(torch.__file__).parent / "include" / path for name, path in BASES.items()}
    check_virtuals({name: path.read_text() for name, path in headers.items() if path.exists()})
    library = Library("megatron_swap_cuda", (SOURCE,), ("c10_cuda", "c10"), cuda_include_folders(torch.version.cuda))
    try:
        loaded = load_library(library, lambda file: ctypes.CDLL(str(file)))
    except OSError as error:
        raise BuildError(str(error)) from error
    loaded.megatron_swap_cuda_install.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    loaded.megatron_swap_cuda_install.restype = ctypes.c_char_p
    loaded.megatron_swap_cuda_remove.argtypes = ()
    loaded.megatron_swap_cuda_remove.restype = None
    return loaded


def include_places() -> list[Path]:
    """Return the folders that may have CUDA's headers, best first: those of this torch, of a toolkit, of triton."""
    packages = Path(torch.__file__).parent.parent
    toolkits = [folder for name in ("CUDA_HOME", "CUDA_PATH") if (folder := os.environ.get(name))]
    return [
        *sorted(packages.glob("nvidia/*/include")),
        *(Path(folder) / "include" for folder in (*toolkits, "/usr/local/cuda")),
        packages / "triton" / "backends" / "nvidia" / "include",
    ]


def cuda_include_folders(version: str) -> tuple[Path, ...]:
    """Return the header folders for the major version of CUDA ``version``: one, or two if ``crt/`` is elsewhere.

    Raises:
        BuildError: headers are missing; the message lists the folders that were searched.
    """
    places = include_places()
    major = version.split(".")[0]
    runtime = next((place for place in places if _major(place) == major), None)
    parts = next((place for place in (runtime, *places) if place and (place / "crt" / "host_config.h").exists()), None)
    if runtime is None or parts is None:
        what = f"headers of CUDA {major} (cuda_runtime.h)" if runtime is None else "CUDA's header crt/host_config.h"
        looked = ", ".join(map(str, places))
        raise BuildError(f"no {what}; set CUDA_HOME to a toolkit. Looked in {looked}")
    return tuple(dict.fromkeys((runtime, parts)))


def _major(place: Path) -> str | None:
    """Return the major version of the CUDA headers in ``place``; ``None`` if there are none."""
    header = place / "cuda_runtime_api.h"
    if not header.exists() or not (place / "cuda_runtime.h").exists():
        return None
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return str(int(found[1]) // 1000) if found else None


def check_virtuals(headers: dict[str, str]) -> None:
    """Check that our allocator overrides every virtual function of torch's.

    A function that a later torch adds with a default body would compile, and then run that default instead of the real
    allocator's function.

    Args:
        headers: text of each header, by the class that it declares.

    Raises:
        BuildError: there are functions that we do not override, or a class has other bases than we know.
    """
    theirs: Counter[str] = Counter()
    for name, base in zip(BASES, [*list(BASES)[1:], None], strict=True):
        bases, body = class_body(headers.get(name, ""), name)
        if bases != ([base] if base else []):
            raise BuildError(f"torch {torch.__version__}: {name} in {BASES[name]} is not the class that we know")
        theirs.update(virtuals(body))
    _, ours = class_body((Path(__file__).parent / SOURCE).read_text(), "Guard")
    unknown = theirs - Counter(re.findall(r"(\w+)\([^;{}]*\)(?:\s*const)?\s*override\b", ours))
    if unknown:
        raise BuildError(f"torch {torch.__version__}: its allocators have functions unknown to us: {sorted(unknown)}")


def class_body(text: str, name: str) -> tuple[list[str] | None, str]:
    """Return the names of a class's bases (``None``: there is no such class), and the text between its braces."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    head = re.search(rf"\b(?:class|struct)\s+(?:\w+\s+)?{name}\b(?:\s+final)?\s*(?::([^;{{(]*))?{{", text)
    if head is None:
        return None, ""
    depth, end = 1, head.end()
    while depth and end < len(text):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    bases = [re.split(r"\W+", base.strip())[-1] for base in (head[1] or "").split(",") if base.strip()]
    return bases, text[head.end() : end]


def virtuals(body: str) -> Iterator[str]:
    """Yield the names of the virtual functions that a class introduces: each overload, no destructors."""
    for declared in re.findall(r"\bvirtual\b([^;{]*)", body):
        before = ""
        while declared != before:  # drop template arguments, which may contain parentheses
            before, declared = declared, re.sub(r"<[^<>]*>", "", declared)
        name, _, rest = declared.partition("(")
        if "~" not in name and not re.search(r"\boverride\b", rest):
            yield name.split()[-1].lstrip("*&")

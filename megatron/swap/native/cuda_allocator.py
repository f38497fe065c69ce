"""Builds and loads ``cuda_allocator.cpp``, which needs CUDA's headers and knows the classes of torch's allocators."""

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
# The base classes of our allocator, each derived from the next, with torch's header of the class.
BASES = {
    "CUDAAllocator": "c10/cuda/CUDACachingAllocator.h",
    "DeviceAllocator": "c10/core/CachingDeviceAllocator.h",
    "Allocator": "c10/core/Allocator.h",
}

# Types of the two functions. Only tests may pass Python functions, which need the interpreter's lock. They deadlock
# with a thread that holds that lock and waits for a lock of the allocating thread.
MAKE_ROOM = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
REPORT = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)


@functools.cache
def load_cuda_allocator() -> ctypes.CDLL:
    """Return the library, and build it if needed, or raise a ``BuildError``. Loading it changes nothing.

    ``megatron_swap_cuda_install(make_room, report)`` takes the addresses of two functions that live as long as the
    process; ``report`` may be ``None``. It returns ``None``, or the reason why it installed nothing, in bytes.
    ``megatron_swap_cuda_remove()`` undoes it.
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
    """Return the folders that may have CUDA's headers, best first: of this torch, of a toolkit, of triton."""
    packages = Path(torch.__file__).parent.parent
    toolkits = [folder for name in ("CUDA_HOME", "CUDA_PATH") if (folder := os.environ.get(name))]
    return [
        *sorted(packages.glob("nvidia/*/include")),
        *(Path(folder) / "include" for folder in (*toolkits, "/usr/local/cuda")),
        packages / "triton" / "backends" / "nvidia" / "include",
    ]


def cuda_include_folders(version: str) -> tuple[Path, ...]:
    """Return the one or two header folders for the major version of CUDA ``version``, or raise a ``BuildError``."""
    places = include_places()
    major = version.split(".")[0]
    runtime = next((place for place in places if _major(place) == major), None)
    # torch's own packages lack the folder crt/, which the runtime's headers include. A toolkit has crt/, and so has
    # triton, which is installed with torch.
    parts = next((place for place in (runtime, *places) if place and (place / "crt" / "host_config.h").exists()), None)
    if runtime is None or parts is None:
        what = f"headers of CUDA {major} (cuda_runtime.h)" if runtime is None else "CUDA's header crt/host_config.h"
        looked = ", ".join(map(str, places))
        raise BuildError(f"no {what}; set CUDA_HOME to a toolkit. Looked in {looked}")
    return tuple(dict.fromkeys((runtime, parts)))


def _major(place: Path) -> str | None:
    header = place / "cuda_runtime_api.h"
    if not header.exists() or not (place / "cuda_runtime.h").exists():
        return None
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return str(int(found[1]) // 1000) if found else None


def check_virtuals(headers: dict[str, str]) -> None:
    """Raise a ``BuildError`` unless our allocator overrides all virtual functions in ``headers``, texts by class."""
    theirs: Counter[str] = Counter()
    for name, base in zip(BASES, [*list(BASES)[1:], None], strict=True):
        bases, body = class_body(headers.get(name, ""), name)
        if bases != ([base] if base else []):
            raise BuildError(f"torch {torch.__version__}: {name} in {BASES[name]} is not the class that we know")
        theirs.update(virtuals(body))
    # A function that a later torch adds with a default body would compile, and run the default instead of the real
    # allocator's function.
    _, ours = class_body((Path(__file__).parent / SOURCE).read_text(), "Guard")
    unknown = theirs - Counter(re.findall(r"(\w+)\([^;{}]*\)(?:\s*const)?\s*override\b", ours))
    if unknown:
        raise BuildError(f"torch {torch.__version__}: its allocators have functions unknown to us: {sorted(unknown)}")


def class_body(text: str, name: str) -> tuple[list[str] | None, str]:
    """Return the names of a class's bases, ``None`` if there is no such class, and the text between its braces."""
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

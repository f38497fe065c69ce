"""Builds the C++ of this folder on first use, once for all processes that share a cache folder.

It calls the compiler once. ``torch.utils.cpp_extension.load`` runs ninja instead, and waits forever for the lock of a
process that was killed while it built.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch

from megatron.swap.common.leftovers import own_folder
from megatron.swap.common.log import logger
from megatron.swap.native.base import Core

FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
COMPILERS = ("g++", "c++", "clang++")
"""Tried in this order where CXX is not set."""
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Library:
    """A library to build. Each is built separately, so that a failure does not affect the others.

    Attributes:
        name: first part of the file's name, before the key.
        sources: file names in this folder.
        linked: names of libraries in torch's folder or the system's.
        include_folders: folders of headers, beside torch's and Python's.
        exported: for a library that is loaded globally, the symbols that it exports; empty: all visible ones.
    """

    name: str
    sources: tuple[str, ...]
    linked: tuple[str, ...]
    include_folders: tuple[Path, ...] = ()
    exported: tuple[str, ...] = ()


MODULE = "megatron_swap_native"
NATIVE = Library(
    MODULE,
    (
        "cuda_runtime.cpp", "transfer_queue.cpp", "storage_access.cpp", "operators.cpp", "host_chunks.cpp", "guard.cpp",
        "machines.cpp", "ram_allocator.cpp", "bindings.cpp",
    ),
    ("c10", "dl"),
    exported=(f"PyInit_{MODULE}", "megatron_swap_operator_hooks"),
)  # fmt: skip


class Native(Protocol):
    """The interface of the C++ part. A storage is passed as its ``_cdata``; the caller keeps it alive.

    ``refuse`` makes every access to its bytes, read or write, raise a RuntimeError with that message, until ``allow``.
    To release the bytes: ``resize_(0)``, then refuse. To restore them: allow, ``resize_(n)``, then copy. A *new* view
    of an emptied storage is refused by torch itself, with another message. These two have no Python fallback.
    """

    def Core(self, name: str, num_in_flight: int, cuda_library: str | None) -> Core: ...
    def refuse(self, storage_impl: int, message: str) -> None: ...
    def allow(self, storage_impl: int) -> None: ...
    def add_reload(self, key: int, function: Callable[[int], bool]) -> None:
        """Let C++ operators (``operator.h``) call ``function`` before they use a storage that refuses access.

        It gets the address of the storage, and returns whether it has reloaded it; False: the storage is not its own.
        """

    def remove_reload(self, key: int) -> None: ...
    def in_use(self, storage_impl: int) -> bool:
        """Whether a C++ operator that has declared the storage has not ended."""


class BuildError(Exception):
    """A library cannot be built. ``load`` logs the reason and goes on without it."""


@functools.cache
def load() -> Native | None:
    """Return the native part, and build it if needed.

    ``None``: it cannot be built, which is logged once, or is not wanted (``MEGATRON_SWAP_NATIVE=0``).
    """
    if os.environ.get("MEGATRON_SWAP_NATIVE") == "0":
        return None
    try:
        return _imported(build(cache_folder()))
    except (BuildError, ImportError, OSError, RuntimeError) as error:
        logger.warning(
            "without the C++ part of this package: no out-of-memory guard; copies are enqueued in Python, more slowly; "
            "another thread, DLPack or C++ that reads a tensor offloaded by TensorSwap gets a null pointer, not an "
            "error. %s", error,
        )
        return None


def include_folder() -> Path:
    """Return the folder in which extensions of others find ``megatron_swap/operator.h``."""
    return Path(__file__).parent / "include"


def cache_folder() -> Path:
    """Return the folder of built libraries: the one of torch's own extensions, or the user's cache."""
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_swap"


def problem() -> str | None:
    """Return why this process has no native part, without building it; ``None``: it has one, or a compiler to build it.

    A library that was built before needs no compiler.
    """
    if os.environ.get("MEGATRON_SWAP_NATIVE") == "0":
        return "MEGATRON_SWAP_NATIVE=0"
    if _file(cache_folder()).exists():
        try:
            _imported(_file(cache_folder()))
        except (ImportError, OSError, RuntimeError) as error:
            return f"{_file(cache_folder())} cannot be loaded: {error}"
        return None
    return None if _compiler() else _no_compiler()


def build(folder: Path, library: Library = NATIVE) -> Path:
    """Return the file of ``library`` in ``folder``; compile it if it is missing. Safe among processes.

    Raises:
        BuildError: there is no compiler, or it failed; the message has its last lines.
        OSError: ``folder`` cannot be written.
    """
    built = _file(folder, library)
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    with built.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with its process, however that ends
        if not built.exists():
            with own_folder(f"{built.stem}-", folder) as (scratch, _):
                made = scratch / built.name
                _compile(library, made)
                made.replace(built)  # atomic: other processes and hosts see the whole file or none
    return built


def _file(folder: Path, library: Library = NATIVE) -> Path:
    return folder / f"{library.name}-{_key(library)}.so"


def _compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)


def _no_compiler() -> str:
    return f"no compiler is on PATH ({', '.join(COMPILERS)}), and CXX is not set"


def _key(library: Library = NATIVE) -> str:
    """Return a hash of all inputs of the build but the compiler, since any one will do."""
    here = Path(__file__).parent
    parts = [torch.__version__, sys.version, platform.machine(), *FLAGS, *library.linked, *library.exported]
    parts += map(str, library.include_folders)
    parts += [path.read_text() for path in [*(here / name for name in library.sources), *sorted(here.rglob("*.h"))]]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(library: Library, target: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise BuildError(_no_compiler())
    here, of_torch = Path(__file__).parent, Path(torch.__file__).parent
    folders = (of_torch / "include", Path(sysconfig.get_path("include")), *library.include_folders)
    command = [
        *compiler.split(), *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(word for folder in folders for word in ("-isystem", f"{folder}")),
        *(f"{here / name}" for name in library.sources), "-o", f"{target}", f"-L{of_torch / 'lib'}",
        *(f"-l{name}" for name in library.linked),
    ]
    if library.exported:
        # -fvisibility=hidden leaves the templates of the standard library visible, and libraries that are loaded
        # later would use ours instead of their own.
        script = target.with_suffix(".map")
        script.write_text(f"{{ global: {'; '.join(library.exported)}; local: *; }};")
        command.append(f"-Wl,--version-script={script}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} did not run: {error}") from error
    if done.returncode:
        words = " | ".join(done.stderr.strip().splitlines()[-5:])
        raise BuildError(f"{compiler} failed with {done.returncode}: {words}")


def _imported(library: Path) -> Native:
    # Loaded globally for operator.h, which looks up a symbol; Python's import alone would load it locally.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location(MODULE, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Native, module)

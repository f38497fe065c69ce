"""Builds the C++ of this folder on first use, once for all processes that share a cache folder.

A library in the cache runs in this process. So each library ends in its checksum, which the loader does not read. It is
loaded only with the right checksum, and only if no other user can have written it.
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
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.swap.common.leftovers import own_folder
from megatron.swap.common.log import logger

FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
COMPILERS = ("g++", "c++", "clang++")  # in this order, unless CXX is set
TIMEOUT_S = 600
CHECKSUM_BYTES = hashlib.sha256().digest_size
FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Library:
    """A library to build. Libraries are built separately, so that a failure does not affect the others."""

    name: str  # first part of the file's name, before the key
    sources: tuple[str, ...]  # file names in this folder
    linked: tuple[str, ...]  # names of libraries in torch's folder or the system's
    include_folders: tuple[Path, ...] = ()  # beside torch's and Python's
    exported: tuple[str, ...] = ()  # symbols of a library that is loaded globally; empty for all visible symbols


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


class BuildError(Exception):
    """A library cannot be built. ``load`` logs the reason and goes on without it."""


@functools.cache
def load() -> Any:
    """Return the module in ``bindings.cpp``, built if needed; None if it cannot be built, or is switched off."""
    if os.environ.get("MEGATRON_SWAP_NATIVE") == "0":
        return None
    try:
        return load_library(NATIVE, _imported)
    except (BuildError, ImportError, OSError, RuntimeError) as error:
        logger.warning(
            "without the C++ part of this package: no out-of-memory guard; TensorSwap's copies begin at once, so that "
            "none can be withdrawn; another thread, DLPack or C++ that reads a tensor offloaded by TensorSwap gets a "
            "null pointer, not an error. %s", error,
        )
        return None


def include_folder() -> Path:
    """Return the folder in which extensions of others find ``megatron_swap/operator.h``."""
    return Path(__file__).parent / "include"


def cache_folder() -> Path:
    """Return the folder of built libraries, in the folder of torch's own extensions or in the user's cache."""
    parent = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(parent) / "megatron_swap"


def problem() -> str | None:
    """Return why this process gets no C++ part, without building it; ``None`` if it is built or there is a compiler."""
    if os.environ.get("MEGATRON_SWAP_NATIVE") == "0":
        return "MEGATRON_SWAP_NATIVE=0"
    built = _file(cache_folder())
    try:
        if built.parent.exists():
            _check_owner(built.parent)
        if _is_intact(built):
            _imported(built)
            return None
    except BuildError as error:
        return str(error)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{built} cannot be loaded: {error}"
    return None if _compiler() else _no_compiler()


def load_library(library: Library, loaded: Callable[[Path], T]) -> T:
    """Return ``loaded(file)`` for the file of ``library`` in the cache. Raises as ``build`` and ``loaded``."""
    file = _file(cache_folder(), library)
    was_there = _is_intact(file)
    try:
        return loaded(build(file.parent, library))
    except (ImportError, OSError) as error:
        if not was_there or _compiler() is None:  # otherwise the file may be of another machine
            raise
        logger.warning("%s cannot be loaded (%s): it is built again.", file, error)
        file.unlink(missing_ok=True)
        return loaded(build(file.parent, library))


def build(folder: Path, library: Library = NATIVE) -> Path:
    """Return the file of ``library`` in ``folder``; compile it if missing or damaged. Safe among processes.

    Raises a ``BuildError`` if there is no compiler, it fails, or the folder is another user's; an ``OSError`` if the
    folder cannot be written.
    """
    _make_folder(folder)
    _check_owner(folder)
    built = _file(folder, library)
    if _is_intact(built):
        return built
    lock = os.open(built.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # The lock ends with its process. torch.utils.cpp_extension.load would wait forever for a killed process's lock.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_intact(built):  # another process has built it
            return built
        if os.path.lexists(built):
            logger.warning("%s is damaged, or others can have written it: it is built again.", built)
        with own_folder(f"{built.stem}-", folder) as (scratch, _):
            made = scratch / built.name
            _compile(library, made)
            _seal(made)
            made.replace(built)  # atomic: other processes and hosts see the whole file or none
        _sync(folder)
    finally:
        os.close(lock)
    return built


def _make_folder(folder: Path) -> None:
    """Make ``folder`` and the folders above, writable for their owner alone."""
    for missing in [one for one in reversed([folder, *folder.parents]) if not one.exists()]:
        missing.mkdir(0o777 & ~FOR_OTHERS, exist_ok=True)


def _check_owner(folder: Path) -> None:
    """Close this user's folder to others, and refuse a folder into which others can put code."""
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & FOR_OTHERS:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~FOR_OTHERS)
        status = folder.stat()
    if not _is_trusted(status):
        raise BuildError(
            f"{folder} belongs to another user, or others can write it, and code in it would run here. Set "
            "TORCH_EXTENSIONS_DIR to a folder of your own"
        )


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & FOR_OTHERS


def _is_intact(built: Path) -> bool:
    """Whether ``built`` is a file as ``_seal`` left it, and no link."""
    try:
        descriptor = os.open(built, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_trusted(status):
            return False
        content = file.read()
    return content[-CHECKSUM_BYTES:] == hashlib.sha256(content[:-CHECKSUM_BYTES]).digest()


def _seal(made: Path) -> None:
    """Append the checksum, close the file to others, and write it to the disk."""
    with made.open("rb+") as file:
        file.write(hashlib.sha256(file.read()).digest())
        file.flush()
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~FOR_OTHERS)
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Write the names in ``folder`` to the disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def _file(folder: Path, library: Library = NATIVE) -> Path:
    return folder / f"{library.name}-{_key(library)}.so"


def _compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)


def _no_compiler() -> str:
    return f"no compiler is on PATH ({', '.join(COMPILERS)}), and CXX is not set"


def _key(library: Library = NATIVE) -> str:
    """Return a hash of all inputs of the build. The compiler is none of them: any compiler will do."""
    here = Path(__file__).parent
    parts = [torch.__version__, sys.version, platform.machine(), *FLAGS, *library.linked, *library.exported]
    parts += ["with a checksum", *map(str, library.include_folders)]
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
        # -fvisibility=hidden leaves templates of the standard library visible. Libraries that are loaded later would
        # use ours instead of their own.
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


def _imported(library: Path) -> Any:
    # Loaded globally for operator.h, which looks up a symbol. Python's import alone would load the library locally.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return imported(MODULE, library)


def imported(name: str, library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

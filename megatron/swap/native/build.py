"""Builds the C++ of this folder on first use, once for all processes that share a cache folder.

It calls the compiler once. ``torch.utils.cpp_extension.load`` runs ninja instead, and waits forever for the lock of a
process that was killed while it built.

What is in the cache runs in this process. So each library ends in its checksum, which the loader does not read, and is
loaded only if that is right and nobody else can have written it.
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
from typing import Protocol, cast

import torch

from megatron.swap.common.leftovers import own_folder
from megatron.swap.common.log import logger

FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
COMPILERS = ("g++", "c++", "clang++")
"""Tried in this order where CXX is not set."""
TIMEOUT_S = 600
CHECKSUM_BYTES = hashlib.sha256().digest_size
FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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
    of an emptied storage is refused by torch itself, with another message.
    """

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
    """Return the folder of built libraries: in that of torch's own extensions, or in the user's cache."""
    parent = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(parent) / "megatron_swap"


def problem() -> str | None:
    """Return why this process has no native part, without building it; ``None``: it has one, or a compiler to build it.

    A library that was built before needs no compiler.
    """
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


def load_library[T](library: Library, loaded: Callable[[Path], T]) -> T:
    """Return what ``loaded`` makes of the file of ``library`` in the cache.

    One that was there and cannot be loaded, such as that of another machine, is built again.

    Raises:
        BuildError: as ``build``.
        ImportError, OSError, RuntimeError: ``loaded`` failed.
    """
    file = _file(cache_folder(), library)
    was_there = _is_intact(file)
    try:
        return loaded(build(file.parent, library))
    except (ImportError, OSError) as error:
        if not was_there or _compiler() is None:
            raise
        logger.warning("%s cannot be loaded (%s): it is built again.", file, error)
        file.unlink(missing_ok=True)
        return loaded(build(file.parent, library))


def build(folder: Path, library: Library = NATIVE) -> Path:
    """Return the file of ``library`` in ``folder``; compile it if it is missing or damaged. Safe among processes.

    Raises:
        BuildError: there is no compiler, or it failed; the message has its last lines. Or the folder is another user's.
        OSError: ``folder`` cannot be written.
    """
    _make_folder(folder)
    _check_owner(folder)
    built = _file(folder, library)
    if _is_intact(built):
        return built
    lock = os.open(built.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with its process, however that ends
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
    """Make ``folder`` and the folders above it, which only their owner can write."""
    for missing in [one for one in reversed([folder, *folder.parents]) if not one.exists()]:
        missing.mkdir(0o777 & ~FOR_OTHERS, exist_ok=True)


def _check_owner(folder: Path) -> None:
    """Refuse a folder into which others can put code; one of this user's is closed to them.

    Raises:
        BuildError: it belongs to another user, or stays open.
    """
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
    """Return whether ``built`` is a file as ``_seal`` left it, and no link to one."""
    try:
        descriptor = os.open(built, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_trusted(status):
            return False
        content = file.read()
    return content[-CHECKSUM_BYTES:] == _checksum(content[:-CHECKSUM_BYTES])


def _seal(made: Path) -> None:
    """Append the checksum, close the file to others, and write it to the disk."""
    with made.open("rb+") as file:
        file.write(_checksum(file.read()))
        file.flush()
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~FOR_OTHERS)
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Write the names in ``folder`` to the disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


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

"""Files and folders of this process that a later process removes if this one is killed.

The owner holds a lock (``flock``), which ends with the owner and with its host. Later processes remove files and
folders of the same prefix, user and boot whose lock is free. Links are never followed, and nothing without a lock is
touched.
"""

import errno
import fcntl
import functools
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".owner"  # the file in a folder whose lock the owner holds


@functools.cache
def boot() -> str:
    """Return the short id of this host's boot; empty if it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return ""


@contextmanager
def own_folder(prefix: str, parent: str | Path | None = None) -> Iterator[tuple[Path, int]]:
    """Make a folder, remove those that killed processes have left, and yield it with the descriptor of its lock."""
    parent = Path(tempfile.gettempdir() if parent is None else parent)
    sweep(parent, prefix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{boot()}-", dir=parent))
        if (lock := _locked(folder / LOCK, os.O_CREAT, 0o600)) is not None:
            break
    try:
        yield folder, lock  # a child that gets the descriptor keeps the folder alive, too
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def own_file(parent: Path, prefix: str, mode: int) -> Iterator[tuple[Path, int]]:
    """Make a file as ``own_folder`` does; no other program has the ``prefix``. The caller may move the file."""
    sweep(parent, prefix)
    while True:
        path = parent / f"{prefix}{boot()}-{secrets.token_hex(4)}"
        if (descriptor := _locked(path, os.O_CREAT | os.O_EXCL, mode)) is not None:
            break
    try:
        yield path, descriptor
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def sweep(parent: Path, prefix: str) -> None:
    """Remove this boot's files and folders in ``parent`` with ``prefix`` whose owner has ended."""
    # On a shared file system another host's locks may not show (Lustre with ``localflock``, NFS with ``nolock``). So
    # names contain the boot id, and only files of this host's present boot are removed.
    if not boot():
        return
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            if entry.name.startswith(f"{prefix}{boot()}-"):
                with suppress(OSError):  # another user's, or another process removes it
                    _remove_if_left(Path(entry.path))


def _remove_if_left(path: Path) -> None:
    status = path.lstat()
    if status.st_uid != os.geteuid():
        return
    is_folder = stat.S_ISDIR(status.st_mode)
    if not is_folder and not stat.S_ISREG(status.st_mode):
        return
    lock = _locked(path / LOCK if is_folder else path)
    if lock is None:
        return
    try:
        if is_folder:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _locked(path: Path, flags: int = 0, mode: int = 0) -> int | None:
    """Open and lock a regular file, or return None if another process has locked or removed it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, mode)
    except FileNotFoundError:
        if flags:
            raise
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = path.lstat()  # it may have been removed before it was locked
        mine = os.fstat(descriptor)
        if stat.S_ISREG(mine.st_mode) and (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
            return descriptor
    except OSError as error:
        # The file system has no locks: the file stays without a lock, and nobody ever removes it.
        if flags and error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
            return descriptor
    os.close(descriptor)
    return None

"""What a killed process leaves is removed by the next one; what lives, or is another's, is not."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megatron.swap.common import leftovers, records
from megatron.swap.common.leftovers import boot, own_file, own_folder

OWNER = """
import subprocess, sys, time
from pathlib import Path
from megatron.swap.common.leftovers import own_file, own_folder
parent = Path(sys.argv[1])
with own_folder("run-", parent) as (folder, lock), own_file(parent, ".part-", 0o600) as (file, descriptor):
    (folder / "content").write_text("x")
    child = subprocess.Popen(["sleep", "60"], pass_fds=(lock,)) if sys.argv[2:] else None
    print(child.pid if child else 0, flush=True)
    time.sleep(60)
"""


def owner(parent: Path, *more: str) -> tuple[subprocess.Popen[str], int]:
    """Start a process that owns a folder and a file in ``parent``. Returns it and its child, 0 if it has none."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, parent, *more], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def killed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def names(parent: Path) -> set[str]:
    return {path.name[:5] for path in parent.iterdir()}


def make_both(parent: Path) -> None:
    with own_folder("run-", parent) as (folder, _), own_file(parent, ".part-", 0o600) as (file, _):
        assert folder.parent == file.parent == parent


def test_both_end_with_their_context(tmp_path: Path) -> None:
    make_both(tmp_path)
    with suppress(ZeroDivisionError), own_folder("run-", tmp_path) as (folder, _):
        (folder / "inside").mkdir()
        raise ZeroDivisionError
    assert names(tmp_path) == set()


def test_a_killed_owners_are_removed_and_a_living_owners_are_not(tmp_path: Path) -> None:
    process, _ = owner(tmp_path)
    make_both(tmp_path)
    assert names(tmp_path) == {"run-" + boot()[0], ".part"}
    assert (next(tmp_path.glob("run-*")) / "content").exists()
    killed(process)
    assert len(list(tmp_path.iterdir())) == 2
    make_both(tmp_path)
    assert names(tmp_path) == set()


def test_a_child_with_the_lock_keeps_the_folder(tmp_path: Path) -> None:
    """The process of a measured run goes on for a while when the program that started it was killed."""
    process, child = owner(tmp_path, "child")
    killed(process)
    make_both(tmp_path)
    assert len(list(tmp_path.glob("run-*"))) == 1
    ended = os.pidfd_open(child)
    os.kill(child, signal.SIGKILL)
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)
    make_both(tmp_path)
    assert names(tmp_path) == set()


def test_links_are_not_followed(tmp_path: Path) -> None:
    kept, parent = tmp_path / "kept", tmp_path / "parent"
    kept.mkdir()
    parent.mkdir()
    (kept / leftovers.LOCK).touch()
    (kept / "precious").touch()
    (parent / f"run-{boot()}-link").symlink_to(kept)
    (parent / f".part-{boot()}-link").symlink_to(kept / "precious")
    inside = parent / f"run-{boot()}-dead"
    inside.mkdir()
    (inside / leftovers.LOCK).touch()
    (inside / "link").symlink_to(kept)
    locked_by_link = parent / f"run-{boot()}-odd"
    locked_by_link.mkdir()
    (locked_by_link / leftovers.LOCK).symlink_to(kept / "precious")
    make_both(parent)
    left = [f".part-{boot()}-link", f"run-{boot()}-link", f"run-{boot()}-odd"]
    assert sorted(path.name for path in parent.iterdir()) == left
    assert sorted(path.name for path in kept.iterdir()) == [leftovers.LOCK, "precious"]


def test_what_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"run-{boot()}-of-another-program").mkdir()  # it has no lock
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / leftovers.LOCK).touch()
    os.mkfifo(tmp_path / f".part-{boot()}-pipe")
    (tmp_path / ".part-0badb007-old").touch()  # another host's: on a shared file system its locks may not show
    (tmp_path / "run-0badb007-old").mkdir()
    (tmp_path / "run-0badb007-old" / leftovers.LOCK).touch()
    make_both(tmp_path)
    kept = set(tmp_path.iterdir())
    assert len(kept) == 5
    ours = tmp_path / f".part-{boot()}-old"
    ours.touch()

    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    for owner, name, fake in ((os, "geteuid", lambda: 12345), (leftovers.fcntl, "flock", unsupported)):
        with monkeypatch.context() as patch:  # another user's; a file system without locks
            patch.setattr(owner, name, fake)
            make_both(tmp_path)
        assert set(tmp_path.iterdir()) == {*kept, ours}
    make_both(tmp_path)
    assert set(tmp_path.iterdir()) == kept


def test_a_plan_whose_writer_was_killed_is_written_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / f".plan.json.swap-part-{boot()}-1234abcd").write_text("hal")
    (tmp_path / ".plan.json.swp").write_text("an editor's")
    records.write_text(tmp_path / "plan.json", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".plan.json.swp", "plan.json"]
    (tmp_path / "plain").touch()
    assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "plain").stat().st_mode

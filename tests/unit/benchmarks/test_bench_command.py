"""The command line of tools/bench.py: refused options, locking, and how it ends when interrupted."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCH = [sys.executable, str(ROOT / "tools" / "bench.py"), "--suite", "quick"]


def bench(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *flags], cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--output", "x.md"), "--output x.md: the name of the rows must end in .jsonl"),
        (("--rounds", "0"), "--rounds 0: at least 1"),
        (("--rounds", "-1"), "--rounds -1: at least 1"),
        (("--time-limit-s", "0"), "--time-limit-s 0: must be more than 0"),
        (("--time-limit-s", "-5"), "--time-limit-s -5: must be more than 0"),
        (("--time-limit-s", "nan"), "--time-limit-s nan: must be more than 0"),
        (("--output", "folder.jsonl", "--resume"), "--output folder.jsonl is no file"),
        (("--output", "held.jsonl"), "--output held.jsonl: another run is writing it"),
        (("--output", "x.jsonl"), "--output x.jsonl: x.md is there, and would be overwritten. Name another file."),
    ],
)
def test_what_is_refused(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    (tmp_path / "x.md").write_text("kept")
    (tmp_path / "folder.jsonl").mkdir()
    with (tmp_path / ".held.jsonl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = bench(tmp_path, *flags)
    assert done.returncode not in (0, 75, 130)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "x.md").read_text() == "kept"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\x80\x00\xff" * 1000)
    done = bench(tmp_path, "--output", "binary.jsonl", "--resume")
    assert done.returncode == 1
    assert "binary.jsonl: cannot be read as rows" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["binary.jsonl"], "no lock is left"


def children_of(parent: int) -> list[int]:
    """Return the live processes that a process started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(number) for number in children.split()]


def is_measured(process: int) -> bool:
    return b"benchmarks.runner.child" in Path(f"/proc/{process}/cmdline").read_bytes()


def test_told_to_end_it_leaves_no_process(tmp_path: Path) -> None:
    running = subprocess.Popen([*BENCH, "--method", "none"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert "runs to do" in running.stdout.readline()
    while not (children := [child for child in children_of(running.pid) if is_measured(child)]):
        assert running.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)  # it has begun; the one who started it has noted that, too
    running.send_signal(signal.SIGTERM)
    rest, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted" in rest
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert list(tmp_path.iterdir()) == [], "neither rows nor a lock"

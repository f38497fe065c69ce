"""The command line of tools/bench.py: refused options, locking, and how it ends when interrupted."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.suites import command as suites_command
from benchmarks.suites import output
from benchmarks.suites.command import main
from benchmarks.suites.suite import find_suite
from benchmarks.sweeps import command as sweeps_command

ROOT = Path(__file__).resolve().parents[3]
BENCH = [sys.executable, str(ROOT / "tools" / "bench.py"), "--suite", "quick"]


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command in this process, in the test's folder; its exit status, and what it says of errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*flags: str) -> tuple[int, str]:
        try:
            status = main(["--suite", "quick", *flags])
        except SystemExit as ended:  # argparse's
            status = int(ended.code or 0)
        return status, capsys.readouterr().err

    return run


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
def test_what_is_refused(
    tmp_path: Path, bench: Callable[..., tuple[int, str]], flags: tuple[str, ...], said: str
) -> None:
    (tmp_path / "x.md").write_text("kept")
    (tmp_path / "folder.jsonl").mkdir()
    with (tmp_path / ".held.jsonl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, told = bench(*flags)
    assert status in (1, 2)
    assert said in told
    assert (tmp_path / "x.md").read_text() == "kept"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path, bench: Callable[..., tuple[int, str]]) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\x80\x00\xff" * 1000)
    status, told = bench("--output", "binary.jsonl", "--resume")
    assert status == 1
    assert "binary.jsonl: cannot be read as rows" in told
    assert len(told) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["binary.jsonl"], "no lock is left"


@pytest.mark.parametrize(
    ("main", "chosen", "name"),
    [
        (suites_command.main, ("--suite", "quick"), "quick.jsonl"),
        (suites_command.main, ("--suite", "mine.toml"), "mine.jsonl"),
        (sweeps_command.main, ("--sweep", "quick"), "quick-sweep.jsonl"),
    ],
)
def test_rows_go_where_git_ignores_them(
    main: Callable[..., int], chosen: tuple[str, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert f"/{output.RUNS.relative_to(ROOT)}/" in (ROOT / ".gitignore").read_text().split()
    shutil.copy(find_suite("quick"), tmp_path / "mine.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(output, "RUNS", tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / name).touch()  # not continued without --resume, so nothing is run
    assert main(chosen) == 1
    assert f"--output runs/{name} exists: continue it with --resume, or name another file" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"mine.toml", "runs"}


def children_of(parent: int) -> list[int]:
    """Return the live processes that a process started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(number) for number in children.split()]


def is_measured(process: int) -> bool:
    return b"benchmarks.runner.child" in Path(f"/proc/{process}/cmdline").read_bytes()


def test_told_to_end_it_leaves_no_process(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [*BENCH, "--method", "none", "--output", "rows.jsonl"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
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

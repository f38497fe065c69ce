"""Runs tests in a copy of the tree, with a fault in it or without."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from megatron.swap.common.leftovers import own_folder

NOT_COPIED = {".git", ".venv", ".venv.lock", ".whl", ".data", ".hypothesis", ".ci", "build", "runs", "checkpoints"}
"""Names in the root of the tree that tests do not need."""
CAUGHT, MISSED, TIMEOUT, BROKEN = "caught", "missed", "timeout", "broken"
"""Outcomes of a trial. Timeout: the tests did not end in time, which counts as caught, because without the fault they
do. Broken: no test ran, so that the fault shows nothing."""
FAILED = re.compile(r"^(FAILED|ERROR) (.+?\.py(?:::.*?)?)(?: - (.*))?$", re.MULTILINE)
RETYPED = "plant it anew"
"""In the error of a test that plants a fault itself and does not find its text. Such a test sees that the code differs,
not that it is wrong, so it is left out and the others go on."""
MAX_ERROR_CHARS = 160
TEST_TIMEOUT_S = 90  # A single test that takes longer fails


@dataclass(frozen=True)
class Outcome:
    outcome: str
    test: str = ""
    error: str = ""
    seconds: float = 0.0


def copy_tree(root: Path, target: Path) -> None:
    def ignore(folder: str, names: list[str]) -> Collection[str]:
        not_needed = NOT_COPIED if Path(folder) == root else set()
        return {name for name in names if name in not_needed or name.endswith(("__pycache__", "_cache"))}

    shutil.copytree(root, target, symlinks=True, ignore=ignore)


class Change(Protocol):
    @property
    def file(self) -> str: ...

    def planted(self, root: Path) -> str: ...


def run_trial(root: Path, fault: Change | None, tests: Sequence[str], timeout_s: float) -> Outcome:
    with own_folder("swap-fault-") as (folder, _):
        scratch = folder.resolve()
        tree = scratch / "tree"
        copy_tree(root, tree)
        if fault is not None:
            text = fault.planted(tree)
            (tree / fault.file).write_text(text)
        began = time.monotonic()
        retyped: list[str] = []
        while True:
            outcome = _run_tests(tree, scratch, [*tests, *retyped], timeout_s - (time.monotonic() - began))
            if fault is None or outcome.outcome != CAUGHT or RETYPED not in outcome.error:
                return outcome
            retyped.append(f"--deselect={outcome.test}")


def _run_tests(tree: Path, scratch: Path, tests: Sequence[str], timeout_s: float) -> Outcome:
    log, temporary = scratch / "log", scratch / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {
        **os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1", "COLUMNS": "400", "TMPDIR": str(temporary),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not gpu", "-p", "no:cacheprovider", "-o",
        f"timeout={TEST_TIMEOUT_S}", "--color=no", *tests,
    ]  # fmt: skip
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
    seconds = round(time.monotonic() - began, 1)
    output = log.read_text(errors="replace").replace(str(scratch), "…")
    return judge(code, output, seconds)


def judge(code: int | None, output: str, seconds: float) -> Outcome:
    """Return the outcome of tests that ended with exit status ``code``; ``None``: they were stopped."""
    if code is None:
        return Outcome(TIMEOUT, "", "the tests did not end", seconds)
    if code == 0:
        return Outcome(MISSED, seconds=seconds)
    failed = FAILED.search(output)
    test, error = (failed[2], (failed[3] or "")[:MAX_ERROR_CHARS]) if failed else ("", "")
    if code < 0:
        return Outcome(CAUGHT, test, f"the tests' process died: {signal.Signals(-code).name}", seconds)
    if code != 1 or not failed:
        last = output.strip().splitlines()[-1:] or [""]
        return Outcome(BROKEN, test, error or last[0][:MAX_ERROR_CHARS], seconds)
    return Outcome(CAUGHT, test, error, seconds)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the tests and all that they have started, also what has a session of its own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.poll() is None:
            for one in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

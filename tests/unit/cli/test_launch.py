"""The launcher's last paragraph: the rank that failed first, in its own words."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron.swap.cli.launch import main, paragraph
from megatron.swap.common import failures

SCRIPT = """
import os, sys
from megatron.swap.common.failures import report_errors
from megatron.swap.common.types import SwapError, UsageError
report_errors((SwapError,))
rank = int(os.environ["RANK"])
{body}
"""


def failure(folder: Path, rank: int, words: str | None, is_known: bool = False, exitcode: int = 1) -> ProcessFailure:
    path = folder / f"{rank}.json"
    if words is not None:
        failures._write(path, words, is_known)
    return ProcessFailure(local_rank=rank, pid=7, exitcode=exitcode, error_file=str(path))


def test_what_all_ranks_say_is_said_once(tmp_path: Path):
    assert paragraph({rank: failure(tmp_path, rank, "wrong", True) for rank in range(2)}) == "wrong"


def test_one_of_several_is_named(tmp_path: Path):
    both = {0: failure(tmp_path, 0, "RuntimeError: Connection closed by peer"), 1: failure(tmp_path, 1, "wrong", True)}
    assert paragraph(both) == "rank 1: wrong"
    assert paragraph({1: failure(tmp_path, 1, "wrong", True)}) == "rank 1: wrong"


def test_of_two_exceptions_the_first_counts(tmp_path: Path):
    both: dict[int, Any] = {1: failure(tmp_path, 1, "ValueError: odd")}
    both[0] = failure(tmp_path, 0, "RuntimeError: Connection closed by peer")
    assert paragraph(both) == "rank 1 ended with ValueError: odd\nIts traceback is above."


def test_a_rank_that_torchrun_ended_is_not_the_one_that_failed(tmp_path: Path):
    """Torchrun's time of its end is in whole seconds, so it may lie before the exception."""
    both = {1: failure(tmp_path, 1, "ValueError: odd"), 0: failure(tmp_path, 0, None, exitcode=-signal.SIGTERM)}
    both[0].timestamp = 0
    assert paragraph(both) == "rank 1 ended with ValueError: odd\nIts traceback is above."
    assert "rank 0 was ended by SIGTERM" in paragraph({0: both[0]})


def test_a_rank_that_left_no_words(tmp_path: Path):
    assert "killed (SIGKILL)" in paragraph({0: failure(tmp_path, 0, None, exitcode=-signal.SIGKILL)})
    assert "ended by SIGSEGV" in paragraph({0: failure(tmp_path, 0, None, exitcode=-signal.SIGSEGV)})
    assert "exit status 2" in paragraph({0: failure(tmp_path, 0, None, exitcode=2)})


@pytest.mark.parametrize(
    ("body", "last"),
    [
        # Torchrun ends the other rank as soon as it sees that one has failed, perhaps before the other fails too.
        ('raise UsageError("wrong")', r"error: (rank \d: )?wrong"),
        ('if rank == 1: raise UsageError("wrong")\nimport time; time.sleep(60)', "error: rank 1: wrong"),
        ('raise ValueError(f"of {rank}") if rank else SystemExit(0)', r"Its traceback is above\."),
    ],
    ids=["all", "one", "exception"],
)
def test_it_is_the_last_on_the_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, body: str, last: str
):
    """Torchrun's report of some thirty lines does not follow."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    monkeypatch.setenv(failures.REPORTED, "1")  # restored afterwards
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(body=body))
    assert main(["--standalone", "--nproc-per-node", "2", str(script)]) == 1
    screen = capfd.readouterr().err.rstrip().splitlines()
    assert re.fullmatch(last, screen[-1])
    assert sum("error: " in line for line in screen) == 1
    assert not any("FAILED" in line or "Root Cause" in line for line in screen)
    assert any("ValueError: of 1" in line for line in screen) == ("ValueError" in body)


def test_a_run_that_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    monkeypatch.setenv(failures.REPORTED, "1")
    script = tmp_path / "script.py"
    script.write_text("")
    assert main(["--standalone", "--nproc-per-node", "1", str(script)]) == 0
    assert sys.excepthook is not None

"""An exception that ends a process leaves its paragraph: on the screen, or in torchrun's file."""

import json
import sys
from pathlib import Path

import pytest

from megatron.swap.common import failures
from megatron.swap.common.types import SwapError, UsageError


def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
    print(f"Traceback of {error!r}", file=sys.stderr)


@pytest.fixture(autouse=True)
def reporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(failures.ERROR_FILE, raising=False)
    monkeypatch.setattr(sys, "excepthook", hook)
    failures.report_errors((SwapError,))
    failures.report_errors((SwapError,))


def fail(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


def test_an_error_of_ours_is_its_paragraph_alone(capsys: pytest.CaptureFixture[str]):
    fail(UsageError("--swap-layers 99: there are 24."))
    assert capsys.readouterr().err == "\nerror: --swap-layers 99: there are 24.\n"
    fail(ValueError("the user's own"))
    assert capsys.readouterr().err == "Traceback of ValueError(\"the user's own\")\n"


def test_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """torchrun quotes the file."""
    monkeypatch.setenv(failures.ERROR_FILE, str(tmp_path / "error.json"))
    fail(UsageError("wrong"))
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == "wrong"
    assert "error: wrong" in capsys.readouterr().err
    fail(ValueError("odd"))
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: odd"
    assert "Traceback of" in capsys.readouterr().err
    (tmp_path / "error.json").unlink()
    fail(KeyboardInterrupt())
    assert not (tmp_path / "error.json").exists(), "an interrupted run did not fail"

"""Lines of the package go to the program's handlers; without any, to standard error."""

from __future__ import annotations

import logging

import pytest

from megatron.swap.common.log import logger


def test_without_handlers_lines_go_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    logger.info("100 %")
    logger.setLevel(logging.WARNING)
    logger.info("dropped")
    logger.setLevel(logging.INFO)
    assert capsys.readouterr() == ("", " swap: 100 %\n")


def test_handlers_of_the_program_get_them_alone(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.info("of %s", "ours")
    assert caplog.record_tuples == [("megatron.swap", logging.INFO, "of ours")]
    assert capsys.readouterr() == ("", "")

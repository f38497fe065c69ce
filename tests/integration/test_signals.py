"""Signals through the real trainer: nothing is lost, and the next run goes on to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import SWAP_SMALL, Run, Trainer, assert_same_checkpoints, recorded

SIGNALLED = Path(__file__).with_name("signalled_script.py")
STEPS = "--train-iters 8 --lr-decay-iters 8 --bf16"
ALL = "--swap-layers all --swap-optimizer 0.5 --swap-disk-dir disk --swap-host-gib 0.05"


@pytest.fixture
def flags(tmp_path: Path) -> str:
    """Flags of a run with all parts of the product, whose disk is ``tmp_path/disk``."""
    (tmp_path / "disk").mkdir()
    return f"{STEPS} {SWAP_SMALL} {ALL.replace(' disk ', f' {tmp_path}/disk ')} {recorded('torch')}"


def goes_on(trainer: Trainer, flags: str, ended: Run, from_step: int) -> None:
    plain = trainer.unswapped(STEPS, saved="torch")
    saved = int((ended.directory / "checkpoint" / "latest_checkpointed_iteration.txt").read_text())
    assert saved == from_step
    went_on = trainer.run(f"{flags} --load {ended.directory}/checkpoint")
    assert went_on.summary["losses"] == plain.summary["losses"][saved:]
    assert_same_checkpoints(plain.directory / "checkpoint", went_on.directory / "checkpoint")


def assert_nothing_left(run: Run, disk: Path) -> None:
    assert list(disk.iterdir()) == []
    left = {path.name for path in run.directory.iterdir()}
    assert left <= {"checkpoint", "log", "summary.json"}, left


def test_megatrons_handler_saves_and_ends(trainer: Trainer, flags: str, tmp_path: Path) -> None:
    """The signal comes in the fourth step. Megatron ends that step and saves it."""
    ended = trainer.run(f"{flags} --exit-signal-handler --exit-signal SIGTERM SIGTERM 7", program=SIGNALLED)
    assert "exiting program after receiving" in ended.output
    assert_nothing_left(ended, tmp_path / "disk")
    goes_on(trainer, flags, ended, 4)


def test_without_a_handler_the_last_checkpoint_stays(trainer: Trainer, flags: str, tmp_path: Path) -> None:
    ended = trainer.run(f"{flags} --save-interval 2 SIGINT 11", check=False, program=SIGNALLED)
    assert ended.returncode == 1, ended.tail
    assert "KeyboardInterrupt" in ended.output
    assert_nothing_left(ended, tmp_path / "disk")
    goes_on(trainer, flags, ended, 4)

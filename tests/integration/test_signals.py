"""Signals through the real trainer: nothing is lost, and the next run goes on to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import SWAP_SMALL, Trainer, recorded
from tests.integration.test_optimizer import EIGHT_STEPS, goes_on

SIGNALLED = Path(__file__).with_name("signalled_script.py")
HANDLED = "--exit-signal-handler --exit-signal SIGTERM"


@pytest.mark.parametrize(
    ("flags", "happens", "code", "said"),
    [
        # In the fourth step. Megatron ends that step and saves it.
        pytest.param(HANDLED, "SIGTERM 7", 0, "exiting program after receiving", id="handled"),
        pytest.param("--save-interval 2", "SIGINT 11", 1, "KeyboardInterrupt", id="not-handled"),
    ],
)
def test_the_next_run_goes_on_behind_the_last_checkpoint(
    trainer: Trainer, tmp_path: Path, flags: str, happens: str, code: int, said: str
) -> None:
    """The run has all parts of the product. It leaves its checkpoints and its log, and nothing else."""
    disk = tmp_path / "disk"
    disk.mkdir()
    ours = f"{SWAP_SMALL} --swap-layers all --swap-optimizer 0.5 --swap-disk-dir {disk} --swap-host-gib 0.05"
    whole = f"{EIGHT_STEPS} {ours} {recorded('torch')}"
    ended = trainer.run(f"{whole} {flags} {happens}", check=False, program=SIGNALLED)
    assert ended.returncode == code, ended.tail
    assert said in ended.output
    assert list(disk.iterdir()) == []
    left = {path.name for path in ended.directory.iterdir()}
    assert left <= {"checkpoint", "log", "summary.json"}, left
    goes_on(trainer, whole, ended)

"""Host memory that another process takes between the checks at the start and the moment when it is needed."""

from pathlib import Path

import pytest

from tests.integration.harness import Trainer, assert_same_training, recorded

TAKEN = Path(__file__).with_name("taken_memory_script.py")
SMALL = "--swap-min-mib 0.001 --swap-host-gib 0.05"


@pytest.mark.parametrize("left_mib", [pytest.param("0.5 0.5", marks=pytest.mark.nightly), "4 0.001"])
def test_a_run_without_a_disk_ends_and_says_why(trainer: Trainer, left_mib: str) -> None:
    """Memory is short before the first step, or in it."""
    run = trainer.failing(f"{SMALL} --swap-layers all --left-mib {left_mib}", program=TAKEN)
    assert "of host memory are available now, fewer than at the start" in run.error, run.tail
    assert "another process has taken them, or a limit of the cgroup" in run.error


def test_a_run_with_a_disk_trains_on(trainer: Trainer) -> None:
    plain = trainer.unswapped(saved="torch")
    flags = f"{SMALL} {recorded('torch')} --swap-layers all --swap-disk-dir ."
    run = trainer.run(f"{flags} --left-mib 4 0.001", program=TAKEN)
    assert_same_training(plain, run)
    assert run.summary["disk_leased_peak_bytes"] > 0

"""Signals, kills and clocks through the real trainer: nothing is lost, and the next run goes on to the bit."""

import signal
from pathlib import Path

import pytest

from tests.integration.harness import SWAP_SMALL, Run, Trainer, assert_same_checkpoints, recorded
from tests.integration.test_optimizer import BF16, EIGHT_STEPS, goes_on

SIGNALLED = Path(__file__).with_name("signalled_script.py")
MORE_STEPS = f"{BF16} --train-iters 24 --lr-decay-iters 24"
HANDLED = "--exit-signal-handler --exit-signal SIGTERM"


def all_parts(folder: Path) -> str:
    """Return flags of a run with all parts of the product, whose disk is ``folder/disk``."""
    disk = folder / "disk"
    disk.mkdir()
    swap = f"--swap-layers all --swap-optimizer 0.5 --swap-disk-dir {disk} --swap-host-gib 0.05"
    return f"{SWAP_SMALL} {swap} {recorded('torch')}"


def assert_nothing_left(run: Run, folder: Path) -> None:
    """Check that a run has left its checkpoints and its log, and nothing else."""
    assert list((folder / "disk").iterdir()) == []
    left = {path.name for path in run.directory.iterdir()}
    assert left <= {"checkpoint", "log", "summary.json"}, left


@pytest.mark.parametrize(
    ("flags", "happens", "code", "said"),
    [
        # In the fourth step. Megatron ends that step and saves it.
        pytest.param(HANDLED, "SIGTERM 7", 0, "exiting program after receiving", id="handled"),
        pytest.param("--save-interval 2", "SIGINT 11", 1, "KeyboardInterrupt", id="not-handled",
                     marks=pytest.mark.nightly),
    ],
)
def test_the_next_run_goes_on_behind_the_last_checkpoint(
    trainer: Trainer, tmp_path: Path, flags: str, happens: str, code: int, said: str
) -> None:
    whole = f"{EIGHT_STEPS} {all_parts(tmp_path)}"
    ended = trainer.run(f"{whole} {flags} {happens}", check=False, program=SIGNALLED)
    assert ended.returncode == code, ended.tail
    assert said in ended.output
    assert_nothing_left(ended, tmp_path)
    goes_on(trainer, whole, ended)


def saved_step(saved: Path) -> int:
    """Return the step of the last checkpoint, 0 without one.

    Megatron-LM empties the file that names it before it writes the next number. If a kill came between, the newest
    checkpoint is whole, and its number is written here, as a user would.
    """
    tracker = saved / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return 0
    if not tracker.read_text():
        newest = max(path.name for path in saved.iterdir() if path.is_dir())
        tracker.write_text(f"{int(newest.removeprefix('iter_'))}")
    return int(tracker.read_text())


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 3])
def test_killed_at_a_random_moment(trainer: Trainer, tmp_path: Path, seed: int) -> None:
    """Every step is saved, so that some are killed in a checkpoint."""
    flags = f"{MORE_STEPS} {all_parts(tmp_path)}"
    killed = trainer.run(f"{flags} --save-interval 1 SIGKILL random:{seed}", check=False, program=SIGNALLED)
    assert killed.returncode == -signal.SIGKILL, killed.tail
    assert_nothing_left(killed, tmp_path)
    saved = saved_step(killed.directory / "checkpoint")
    plain = trainer.unswapped(MORE_STEPS, saved="torch")
    went_on = trainer.run(f"{flags} --load {killed.directory}/checkpoint" if saved else flags)
    assert went_on.summary["losses"] == plain.summary["losses"][saved:]
    assert_same_checkpoints(plain.directory / "checkpoint", went_on.directory / "checkpoint")


@pytest.mark.nightly
def test_a_clock_that_jumps_changes_no_plan_and_no_figure(trainer: Trainer) -> None:
    """What is timed is timed by a clock that never jumps. Megatron's own lines show the jumps."""
    flags = "--train-iters 14 --lr-decay-iters 14"
    plain = trainer.unswapped(flags, saved="torch")
    ours = f"{SWAP_SMALL} --swap-memory-gib 0.003 --swap-optimizer auto {recorded('torch')}"
    run = trainer.run(f"{flags} {ours} clock 2", program=SIGNALLED)
    assert run.summary["losses"] == plain.summary["losses"]
    assert_same_checkpoints(plain.directory / "checkpoint", run.directory / "checkpoint")
    assert run.summary["planning"]["stages"][-1]["stage"] == "stable"
    assert 0 < run.summary["planning"]["predicted_step_ms"] < 600_000
    assert all(0 <= step["wait_ms"] < 600_000 for step in run.summary["steps"])

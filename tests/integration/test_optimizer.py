"""Optimizer state offloaded by the real trainer: equal to the bit, also after a resume."""

import signal
from pathlib import Path

import pytest

from megatron.swap.common.plan import load_plan
from megatron.swap.common.types import GIB
from tests.integration.harness import SWAP_SMALL, Run, Trainer, assert_same_checkpoints, assert_same_training, recorded
from tests.integration.rows import BF16, DISTRIBUTED, EXPERTS_DP2, ON_DISK, PLANNING_STATE

FAILING_DISK = Path(__file__).with_name("failing_disk_script.py")
PRECISE = f"{BF16} --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16"
PRECISE_ADAM = Path(__file__).with_name("precise_adam_script.py")


@pytest.mark.parametrize(
    "types",
    ["--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
     pytest.param("--exp-avg-dtype fp16 --exp-avg-sq-dtype bf16 --main-params-dtype fp16", marks=pytest.mark.nightly)],
)
def test_lean_state_of_the_precision_aware_optimizer(trainer: Trainer, types: str) -> None:
    flags = f"{PRECISE} {types}"
    plain = trainer.unswapped(flags, program=PRECISE_ADAM)
    run = trainer.run(f"{flags} {SWAP_SMALL} --swap-optimizer 1 {recorded('torch')}", program=PRECISE_ADAM)
    assert_same_training(plain, run)
    assert run.summary["optimizer_host_bytes"] > 0


@pytest.mark.nightly
def test_lean_state_goes_through_checkpoints(trainer: Trainer) -> None:
    """Saving and loading give every value its scale, wherever the values are, also where some state is kept."""
    types = "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"
    flags = f"{PRECISE} {types} --train-iters 4 {recorded('torch_dist')}"
    swap = f"{SWAP_SMALL} --swap-optimizer 0.5"
    first = trainer.run(f"{flags} --exit-interval 2", program=PRECISE_ADAM)
    swapped_first = trainer.run(f"{flags} {swap} --exit-interval 2", program=PRECISE_ADAM)
    assert_same_checkpoints(first.directory / "checkpoint", swapped_first.directory / "checkpoint")
    load = f"--load {first.directory / 'checkpoint'}"
    second = trainer.run(f"{flags} {load}", program=PRECISE_ADAM)
    swapped_second = trainer.run(f"{flags} {swap} {load}", program=PRECISE_ADAM)
    assert swapped_second.summary["losses"] == second.summary["losses"]
    assert_same_checkpoints(second.directory / "checkpoint", swapped_second.directory / "checkpoint")


@pytest.mark.nightly
def test_as_much_is_offloaded_as_the_budget_asks_for(trainer: Trainer) -> None:
    """In the emulation, state that is kept counts too. The fraction depends on the machine's copy speed."""
    flags = f"{BF16} {PLANNING_STATE}"
    budget_gib = 1.5 * trainer.unswapped(flags).summary["saved_peak_bytes"] / GIB
    _, run = trainer.pair(flags, f"--swap-optimizer auto --swap-memory-gib {budget_gib} --swap-save-plan plan.json")
    assert run.summary["planning"]["stages"][-1]["stage"] == "stable"
    found = load_plan(run.directory / "plan.json").offload_fraction
    assert found is not None
    assert 0 <= found <= 1
    # The saved plan has the fraction to offload. It takes effect at once.
    _, again = trainer.pair(BF16, f"--swap-optimizer auto --swap-plan {run.directory / 'plan.json'}")
    assert ("optimizer state of" in again.output) == (found > 0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("first", "then", "more", "saved"),
    [
        pytest.param("1", "0", "", "torch", id="one-zero"),
        (f"1 {ON_DISK}", "0.5", "", "torch_dist"),
        ("0", "1", "--optimizer muon", "torch_dist"),
    ],
)  # fmt: skip
def test_a_checkpoint_goes_on_with_another_fraction(
    trainer: Trainer, first: str, then: str, more: str, saved: str
) -> None:
    """Four steps and four more after a resume equal eight steps at once."""
    flags = f"{BF16} {more} --train-iters 8 --lr-decay-iters 8"
    plain = trainer.unswapped(flags, saved=saved)
    begun = trainer.run(
        f"{flags} {SWAP_SMALL} --swap-optimizer {first} --exit-interval 4 {recorded(saved)}", check=False
    )
    went_on = trainer.run(
        f"{flags} {SWAP_SMALL} --swap-optimizer {then} {recorded(saved)} --load {begun.directory}/checkpoint"
    )
    assert went_on.summary["losses"] == plain.summary["losses"][4:]
    assert_same_checkpoints(plain.directory / "checkpoint", went_on.directory / "checkpoint")


@pytest.mark.parametrize(("first", "then", "saved"), [
    pytest.param("1", "0", "torch_dist", marks=pytest.mark.nightly), ("0", f"1 {ON_DISK}", "torch"),
])  # fmt: skip
def test_a_checkpoint_of_the_distributed_optimizer_goes_on_with_another_fraction(
    trainer: Trainer, first: str, then: str, saved: str
) -> None:
    """The case has two ranks, and the kind of Adam with which upstream can resume the distributed optimizer."""
    flags, program = f"{BF16} {DISTRIBUTED} --train-iters 8 --lr-decay-iters 8", {"ranks": 2, "program": PRECISE_ADAM}
    plain = trainer.unswapped(flags, saved=saved, **program)
    flags += f" {SWAP_SMALL} {recorded(saved)}"
    begun = trainer.run(f"{flags} --swap-optimizer {first} --exit-interval 4", **program)
    went_on = trainer.run(f"{flags} --swap-optimizer {then} --load {begun.directory}/checkpoint", **program)
    assert ["optimizer state of" in run.output for run in (begun, went_on)] == [first != "0", then != "0"]
    assert went_on.summary["losses"] == plain.summary["losses"][4:]
    assert_same_checkpoints(plain.directory / "checkpoint", went_on.directory / "checkpoint")


EIGHT_STEPS = f"{BF16} --train-iters 8 --lr-decay-iters 8"
ALL_ON_DISK = f"{EIGHT_STEPS} --swap-min-mib 0 --swap-optimizer 1 {ON_DISK} {recorded('torch')}"
DISK_FULL, DISK_BROKEN = "writing failed (No space left on device", "reading failed (Input/output error"


def goes_on(trainer: Trainer, flags: str, ended: Run) -> None:
    plain = trainer.unswapped(EIGHT_STEPS, saved="torch")
    went_on = trainer.run(f"{flags} --load {ended.directory}/checkpoint")
    assert went_on.summary["losses"] == plain.summary["losses"][4:]
    assert_same_checkpoints(plain.directory / "checkpoint", went_on.directory / "checkpoint")


@pytest.mark.parametrize(
    ("fails_behind", "told"),
    [pytest.param("writes-fail-behind 10", DISK_FULL, marks=pytest.mark.short),
     pytest.param("writes-fail-behind 16", DISK_FULL, marks=pytest.mark.nightly),
     pytest.param("reads-fail-behind 10", DISK_BROKEN, marks=pytest.mark.nightly)],
    ids=["writes", "writes-in-the-last-step", "reads"],
)
def test_a_disk_that_fails_leaves_the_last_checkpoint(trainer: Trainer, fails_behind: str, told: str) -> None:
    """The disk fails during training or in the last step. Megatron saves a checkpoint after the last step."""
    failed = trainer.failing(f"{ALL_ON_DISK} --save-interval 4 --{fails_behind}", program=FAILING_DISK)
    assert told in failed.output, failed.tail
    assert "are free). A checkpoint that was saved is intact" in failed.output, failed.tail
    goes_on(trainer, f"{EIGHT_STEPS} {recorded('torch')}", failed)


@pytest.mark.nightly
def test_a_slow_disk_changes_nothing(trainer: Trainer) -> None:
    run = trainer.run(f"{ALL_ON_DISK} --slow-behind 4", program=FAILING_DISK)
    assert_same_training(trainer.unswapped(EIGHT_STEPS, saved="torch"), run)
    assert "reads and writes were slow" in run.output, run.tail


def test_a_run_that_is_killed_leaves_the_last_checkpoint_and_nothing_on_disk(trainer: Trainer, tmp_path: Path) -> None:
    """``kill -9`` ends the run during a write, after ten of sixteen micro-batches. The next run resumes in the same
    folder."""
    (tmp_path / "disk").mkdir()
    swapped = ALL_ON_DISK.replace("--swap-disk-dir .", f"--swap-disk-dir {tmp_path}/disk")
    killed = trainer.run(f"{swapped} --save-interval 4 --killed-behind 10", check=False, program=FAILING_DISK)
    assert killed.returncode == -signal.SIGKILL, killed.tail
    assert "killed in a write" in killed.output, killed.tail
    assert list((tmp_path / "disk").iterdir()) == []
    goes_on(trainer, swapped, killed)


@pytest.mark.nightly
def test_a_checkpoint_in_the_middle_of_training_of_several_optimizers(trainer: Trainer) -> None:
    """Experts have an optimizer of their own. The checkpoint has the values of offloaded state, not its
    placeholders."""
    flags = f"{EXPERTS_DP2} --bf16 --train-iters 4 --exit-interval 2 {recorded('torch_dist')}"
    plain = trainer.run(flags, ranks=2)
    run = trainer.run(f"{flags} {SWAP_SMALL} --swap-optimizer 1", ranks=2)
    assert_same_checkpoints(plain.directory / "checkpoint", run.directory / "checkpoint")
    files = [[path for path in (one.directory / "checkpoint").rglob("*") if path.is_file()] for one in (plain, run)]
    sizes = [sum(path.stat().st_size for path in paths) for paths in files]
    assert 0 < sizes[1] < 1.05 * sizes[0], "whole mappings were written"

"""Optimizer state offloaded by the real trainer: equal to the bit, also after a resume."""

from __future__ import annotations

import importlib.util
import signal
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron.swap.common.plan import load_plan
from megatron.swap.common.types import GIB, MIB, UsageError
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.megatron_lm.optimizer_swap import OffloadSettings, OptimizerSwap
from tests.integration.harness import SWAP_SMALL, Run, Trainer, assert_same_checkpoints, assert_same_training, recorded
from tests.integration.rows import BF16, DISTRIBUTED, ON_DISK, PLANNING_STATE

FAILING_DISK = Path(__file__).with_name("failing_disk_script.py")
FUSED_ADAM = Path(__file__).with_name("fused_adam_script.py")
PRECISE = f"{BF16} --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype {{}}"
PRECISE_ADAM = Path(__file__).with_name("precise_adam_script.py")


@pytest.mark.parametrize(
    ("grads", "types"),
    [
        ("fp32", "--exp-avg-dtype bf16"),
        ("bf16", "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"),
        ("bf16", "--exp-avg-dtype fp16 --exp-avg-sq-dtype bf16 --main-params-dtype fp16"),
    ],
)
def test_lean_state_of_the_precision_aware_optimizer(trainer: Trainer, grads: str, types: str) -> None:
    flags = f"{PRECISE.format(grads)} {types}"
    plain = trainer.unswapped(flags, program=PRECISE_ADAM)
    run = trainer.run(f"{flags} {SWAP_SMALL} --swap-optimizer 1 {recorded('torch')}", program=PRECISE_ADAM)
    assert_same_training(plain, run)
    assert run.summary["optimizer_host_bytes"] > 0


def test_lean_state_goes_through_checkpoints(trainer: Trainer) -> None:
    """Saving and loading give every value its scale, wherever the values are, also where some state is kept."""
    types = "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"
    flags = f"{PRECISE.format('bf16')} {types} --train-iters 4 {recorded('torch_dist')}"
    swap = f"{SWAP_SMALL} --swap-optimizer 0.5"
    first = trainer.run(f"{flags} --exit-interval 2", program=PRECISE_ADAM)
    swapped_first = trainer.run(f"{flags} {swap} --exit-interval 2", program=PRECISE_ADAM)
    assert_same_checkpoints(first.directory / "checkpoint", swapped_first.directory / "checkpoint")
    load = f"--load {first.directory / 'checkpoint'}"
    second = trainer.run(f"{flags} {load}", program=PRECISE_ADAM)
    swapped_second = trainer.run(f"{flags} {swap} {load}", program=PRECISE_ADAM)
    assert swapped_second.summary["losses"] == second.summary["losses"]
    assert_same_checkpoints(second.directory / "checkpoint", swapped_second.directory / "checkpoint")


@pytest.mark.short
def test_rules_that_are_not_known_are_refused() -> None:
    swap = OptimizerSwap(EmulatedDevice(0.0), OffloadSettings(1.0, MIB))
    with pytest.raises(UsageError, match=r"whether Adafactor steps each parameter alone.* Leave --swap-optimizer out"):
        swap.attach(Namespace(optimizer=torch.optim.Adafactor([torch.zeros(8)])))
    swap.close()


@pytest.mark.parametrize(("part", "most"), [(1.5, 1.0), (4.0, 0.0)])
def test_as_much_is_offloaded_as_the_budget_asks_for(trainer: Trainer, part: float, most: float) -> None:
    """Budgets are fractions of the activations' memory. In the emulation, state that is kept counts too. Between the
    extremes the fraction depends on the machine's copy speed."""
    flags = f"{BF16} {PLANNING_STATE}"
    budget_gib = part * trainer.unswapped(flags).summary["saved_peak_bytes"] / GIB
    _, run = trainer.pair(flags, f"--swap-optimizer auto --swap-memory-gib {budget_gib} --swap-save-plan plan.json")
    assert run.summary["planning"]["stages"][-1]["stage"] == "stable"
    found = load_plan(run.directory / "plan.json").offload_fraction
    assert found is not None
    assert 0 <= found <= most
    # The saved plan has the fraction to offload. It takes effect at once.
    _, again = trainer.pair(BF16, f"--swap-optimizer auto --swap-plan {run.directory / 'plan.json'}")
    assert ("optimizer state of" in again.output) == (found > 0)


def test_state_on_disk_is_part_of_the_plan(trainer: Trainer) -> None:
    """The profile has the time of the disk, which is known once state has been read and written."""
    flags = f"{BF16} {PLANNING_STATE}"
    budget_gib = 1.5 * trainer.unswapped(flags).summary["saved_peak_bytes"] / GIB
    _, run = trainer.pair(flags, f"--swap-optimizer auto --swap-memory-gib {budget_gib} --swap-disk-dir . "
                          "--swap-host-gib 0.04 --swap-save-profile profile.json")  # fmt: skip
    assert run.summary["optimizer_disk_bytes"] > 0
    assert run.summary["planning"]["stages"][-1]["stage"] == "stable"
    offloaded_state = load_profile(run.directory / "profile.json").offloaded_state
    assert offloaded_state is not None
    assert offloaded_state.disk_gib >= run.summary["optimizer_disk_bytes"] / GIB * 0.99
    assert offloaded_state.disk_ms > 0


@pytest.mark.parametrize(
    ("first", "then", "more", "saved"),
    [
        pytest.param("1", "0", "", "torch", id="one-zero"),
        ("0.5", f"1 {ON_DISK}", "", "torch_dist"), (f"1 {ON_DISK}", "0", "", "torch_dist"),
        ("0", "1", "--optimizer muon", "torch_dist"), ("1", "0", "--optimizer muon", "torch_dist"),
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


@pytest.mark.parametrize(
    ("first", "then", "saved"), [("1", "0", "torch_dist"), ("0", "1", "torch"), ("0.5", f"1 {ON_DISK}", "torch_dist")]
)
def test_a_checkpoint_of_the_distributed_optimizer_goes_on_with_another_fraction(
    trainer: Trainer, first: str, then: str, saved: str
) -> None:
    """The case has two ranks, and the kind of Adam with which upstream can resume the distributed optimizer."""
    flags, program = f"{BF16} {DISTRIBUTED} --train-iters 8 --lr-decay-iters 8", {"ranks": 2, "program": FUSED_ADAM}
    plain = trainer.unswapped(flags, saved=saved, **program)
    flags += f" {SWAP_SMALL} {recorded(saved)}"
    begun = trainer.run(f"{flags} --swap-optimizer {first} --exit-interval 4", **program)
    went_on = trainer.run(f"{flags} --swap-optimizer {then} --load {begun.directory}/checkpoint", **program)
    assert ["optimizer state of" in run.output for run in (begun, went_on)] == [first != "0", then != "0"]
    assert went_on.summary["losses"] == plain.summary["losses"][4:]
    assert_same_checkpoints(plain.directory / "checkpoint", went_on.directory / "checkpoint")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("saved", ["torch", "torch_dist"])
def test_a_checkpoint_of_the_distributed_optimizer_goes_on_on_a_gpu(trainer: Trainer, saved: str) -> None:
    """The optimizer is TransformerEngine's or Apex's Adam. Upstream can resume the distributed optimizer with no other.

    What is saved in the end is that of a run which went on without swapping. Of eight steps at once it is not:
    upstream's data loaders draw a seed from the CPU's generator, behind what the checkpoint has restored there.
    """
    if not any(map(importlib.util.find_spec, ("transformer_engine", "apex"))):
        pytest.skip("needs TransformerEngine or Apex")
    flags = f"{BF16} {DISTRIBUTED} --train-iters 8 --lr-decay-iters 8 --distributed-backend nccl --swap-deterministic"
    flags += f" --swap-min-mib 0.001 --swap-host-gib 0.5 {recorded(saved)}"

    def run(part: str, more: str = "") -> Run:
        done = trainer.run(f"{flags} --swap-optimizer {part} {more}", env={"CUDA_VISIBLE_DEVICES": "0"})
        assert ("optimizer state of" in done.output) == (part != "0"), done.tail
        return done

    plain = run("0")
    begun = {part: run(part, "--exit-interval 4") for part in "01"}
    went_on = {
        (first, then): run(then, f"--load {begun[first].directory}/checkpoint") for first in "01" for then in "01"
    }
    for one in went_on.values():
        assert one.summary["losses"] == plain.summary["losses"][4:]
        assert_same_checkpoints(went_on["0", "0"].directory / "checkpoint", one.directory / "checkpoint")


DISK_FULL, DISK_BROKEN = "writing failed (No space left on device", "reading failed (Input/output error"


@pytest.mark.parametrize(
    ("fails_behind", "told"),
    [pytest.param("writes-fail-behind 10", DISK_FULL, marks=pytest.mark.short), ("writes-fail-behind 16", DISK_FULL),
     ("reads-fail-behind 10", DISK_BROKEN)],
    ids=["writes", "writes-in-the-last-step", "reads"],
)
def test_a_disk_that_fails_leaves_the_last_checkpoint(trainer: Trainer, fails_behind: str, told: str) -> None:
    """The disk fails during training or in the last step. Megatron saves a checkpoint after the last step."""
    flags = f"{BF16} --train-iters 8 --lr-decay-iters 8"
    plain = trainer.unswapped(flags, saved="torch")
    swapped = f"{flags} --swap-min-mib 0 --swap-optimizer 1 {ON_DISK}"
    swapped += f" {recorded('torch')} --save-interval 4 --{fails_behind}"
    failed = trainer.failing(swapped, program=FAILING_DISK)
    assert told in failed.output, failed.tail
    assert "are free). A checkpoint that was saved is intact" in failed.output, failed.tail
    went_on = trainer.run(f"{flags} --swap-layers none {recorded('torch')} --load {failed.directory}/checkpoint")
    assert went_on.summary["losses"] == plain.summary["losses"][4:]
    assert_same_checkpoints(plain.directory / "checkpoint", went_on.directory / "checkpoint")


def test_a_slow_disk_changes_nothing(trainer: Trainer) -> None:
    flags = f"{BF16} --train-iters 8 --lr-decay-iters 8"
    swapped = f"{flags} --swap-min-mib 0 --swap-optimizer 1 {ON_DISK} {recorded('torch')} --slow-behind 4"
    run = trainer.run(swapped, program=FAILING_DISK)
    assert_same_training(trainer.unswapped(flags, saved="torch"), run)
    assert "reads and writes were slow" in run.output, run.tail


def test_a_run_that_is_killed_leaves_the_last_checkpoint_and_nothing_on_disk(trainer: Trainer, tmp_path: Path) -> None:
    """``kill -9`` ends the run during a write, after ten of sixteen micro-batches. The next run resumes in the same
    folder."""
    (tmp_path / "disk").mkdir()
    flags = f"{BF16} --train-iters 8 --lr-decay-iters 8"
    plain = trainer.unswapped(flags, saved="torch")
    on_disk = ON_DISK.replace("--swap-disk-dir .", f"--swap-disk-dir {tmp_path}/disk")
    swapped = f"{flags} --swap-min-mib 0 --swap-optimizer 1 {on_disk} {recorded('torch')}"
    killed = trainer.run(f"{swapped} --save-interval 4 --killed-behind 10", check=False, program=FAILING_DISK)
    assert killed.returncode == -signal.SIGKILL, killed.tail
    assert "killed in a write" in killed.output, killed.tail
    assert list((tmp_path / "disk").iterdir()) == []
    went_on = trainer.run(f"{swapped} --load {killed.directory}/checkpoint")
    assert went_on.summary["losses"] == plain.summary["losses"][4:]
    assert_same_checkpoints(plain.directory / "checkpoint", went_on.directory / "checkpoint")


EXPERTS = (
    "--bf16 --swiglu --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
)


@pytest.mark.parametrize(
    ("flags", "saved"), [(EXPERTS, "torch"), (f"{EXPERTS} --use-distributed-optimizer", "torch_dist")]
)
def test_a_checkpoint_in_the_middle_of_training_of_several_optimizers(trainer: Trainer, flags: str, saved: str) -> None:
    """Experts have an optimizer of their own. The checkpoint has the values of offloaded state, not its
    placeholders."""
    flags = f"{flags} --train-iters 4 --exit-interval 2 {recorded(saved)}"
    plain = trainer.run(flags, ranks=2)
    run = trainer.run(f"{flags} {SWAP_SMALL} --swap-optimizer 1", ranks=2)
    assert_same_checkpoints(plain.directory / "checkpoint", run.directory / "checkpoint")
    files = [[path for path in (one.directory / "checkpoint").rglob("*") if path.is_file()] for one in (plain, run)]
    sizes = [sum(path.stat().st_size for path in paths) for paths in files]
    assert 0 < sizes[1] < 1.05 * sizes[0], "whole mappings were written"

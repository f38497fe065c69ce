"""The out-of-memory guard through the real trainer. The emulated device has too little memory for the run."""

import re

import pytest

from megatron.swap.common.types import GIB, MIB
from tests.integration.harness import SWAP_SMALL, Trainer, assert_same_training
from tests.unit.native.helpers import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER


@pytest.mark.short
def test_a_run_that_has_enough_is_not_touched(trainer: Trainer) -> None:
    _, run = trainer.pair("", "--swap-layers none --swap-oom-guard")
    assert run.summary["num_rescues"] == run.summary["rescued_bytes"] == run.summary["swapped_out_bytes"] == 0
    assert "the out-of-memory guard was not needed" in run.output


@pytest.mark.nightly
def test_a_run_that_plans_itself_is_rescued_until_its_plan_fits(trainer: Trainer) -> None:
    """The budget exceeds the device, which lacks a third of what autograd holds. The missing bytes lead to a plan that
    fits. Sizes are large enough to measure the link on such a device."""
    flags = ("--hidden-size 128 --seq-length 256 --max-position-embeddings 256 --train-iters 20 --lr-decay-iters 20 "
             "--pipeline-model-parallel-size 2 --global-batch-size 8")  # fmt: skip
    plain = trainer.unswapped(f"{flags} --swap-cpu-memory-gib 4", ranks=2)
    saved_bytes = plain.summary["saved_peak_bytes"]
    memory_gib = (plain.summary["device_peak_bytes"] - 0.3 * saved_bytes) / GIB
    run = trainer.live(
        f"{flags} {SWAP_SMALL} --swap-oom-guard --swap-cpu-memory-gib {memory_gib} "
        f"--swap-memory-gib {0.95 * saved_bytes / GIB}", ranks=2,
    )  # fmt: skip
    assert_same_training(plain, run)
    rescued = [step["iteration"] for step in run.summary["steps"] if step["num_rescues"]]
    assert rescued
    assert rescued == list(range(rescued[0], rescued[0] + len(rescued)))  # until it was planned anew
    planning = run.summary["planning"]
    assert planning["num_replans"] >= 1
    assert rescued[-1] < planning["stages"][-1]["first_step"]
    assert planning["predicted_peak_gib"] < 0.95 * saved_bytes / GIB - run.summary["short_bytes"] / 2 / GIB


def test_too_little_even_for_the_guard_ends_in_pytorchs_error_with_what_holds_the_memory(trainer: Trainer) -> None:
    limit = f"--swap-cpu-memory-gib {5 * MIB / GIB}"
    run = trainer.failing(f"--swap-layers none {SWAP_SMALL} --swap-oom-guard {limit} --swap-summary summary.json")
    assert "torch.OutOfMemoryError: The emulated device is out of memory" in run.output
    assert "Megatron Swap's out-of-memory guard has nothing more to evict" in run.output
    assert "out of memory; peak memory by kind:" in run.output
    assert re.search(r"^ swap:\s+activations +[1-9]", run.output, flags=re.MULTILINE), run.tail


@pytest.mark.nightly
def test_without_the_native_part_the_flag_is_refused_before_the_model_is_built(trainer: Trainer) -> None:
    run = trainer.failing("--swap-layers none --swap-oom-guard", env={"MEGATRON_SWAP_NATIVE": "0"})
    assert run.error.startswith("--swap-oom-guard needs the C++ part of this package")
    assert "building GPT model" not in run.output

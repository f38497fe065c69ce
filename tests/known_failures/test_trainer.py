"""Known failures of offloading in training with several ranks, or with batches that differ: the real trainer."""

from pathlib import Path

import pytest

from megatron.swap.common.types import GIB
from tests.integration.harness import SWAP_SMALL, Trainer, assert_same_training, recorded
from tests.sizes import sized

SCRIPT = Path(__file__).with_name("trainer_script.py")
EXPERTS = (
    f"--num-layers {sized(4, nightly=8)} --num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax "
    "--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall --disable-bias-linear "
    "--expert-model-parallel-size 2"
)
UNEQUAL_LENGTHS = "--tokens 16 64 64 64 --global-batch-size 8"


class TestCheckpointHangs:
    """Saving a checkpoint with offloaded optimizer state never ends.

    Seen in NVIDIA/Megatron-LM#4910: some ranks waited in an all-gather, others in an all-reduce.
    NVIDIA/Megatron-LM#6573 found that ranks held different entries of optimizer state.

    Here: every rank materializes its state first, without communication; names and shapes are those of a run without
    offloading.
    """

    @pytest.mark.slow
    @pytest.mark.timeout(200)
    def test_two_ranks_with_experts(self, trainer: Trainer) -> None:
        """The checkpoint in the middle of training holds the same as without offloading, and so does the last one."""
        flags = (
            f"{EXPERTS} --bf16 --use-distributed-optimizer --train-iters 4 --lr-decay-iters 4 --ckpt-format torch_dist "
            "--save checkpoint --save-interval 2 --swap-summary summary.json"
        )
        plain = trainer.run(f"{flags} --swap-layers none", ranks=2)
        swapped = trainer.run(f"{flags} {SWAP_SMALL} --swap-layers all --swap-optimizer 0.5", ranks=2, timeout_s=60.0)
        assert_same_training(plain, swapped)
        assert swapped.summary["optimizer_in_bytes"] > 0
        assert (swapped.directory / "checkpoint" / "iter_0000002").is_dir()


class TestShorterFirstMicroBatch:
    """The same with the real trainer: one of four micro-batches is a quarter as long, and it comes first."""

    @pytest.mark.slow
    def test_all_layers(self, trainer: Trainer) -> None:
        plain = trainer.unswapped(UNEQUAL_LENGTHS, program=SCRIPT)
        flags = f"{UNEQUAL_LENGTHS} {SWAP_SMALL} --swap-layers all --swap-verify {recorded('torch')}"
        swapped = trainer.run(flags, program=SCRIPT)
        assert_same_training(plain, swapped)
        assert swapped.summary["saved_peak_bytes"] < plain.summary["saved_peak_bytes"]
        assert [step["num_late"] for step in swapped.summary["steps"]][1:] == [0, 0]


class TestRanksDriftApart:
    """Ranks that plan alone, by their own tokens, drift apart and hang.

    Seen, without offloading, in deepspeedai/DeepSpeed#6809: each rank sized its experts' buffers by its own routing,
    and the all-to-all stalled.

    Here: ranks exchange measurements and profiles. In each pipeline stage the rank that saves most plans for all, and
    all change behind the same step.
    """

    @pytest.mark.slow
    @pytest.mark.timeout(200)
    def test_two_ranks_of_experts_within_a_budget(self, trainer: Trainer) -> None:
        flags = f"{EXPERTS} --train-iters 14 --lr-decay-iters 14"
        plain = trainer.unswapped(flags, ranks=2, program=SCRIPT)
        saved = [rank["saved_peak_bytes"] for rank in plain.summary["ranks"]]
        assert saved[0] != saved[1], "routing is even: the test shows nothing"
        budget_gib = 0.7 * max(saved) / GIB
        run = trainer.run(
            f"{flags} {SWAP_SMALL} --swap-memory-gib {budget_gib} {recorded('torch')}",
            ranks=2, program=SCRIPT, timeout_s=60.0,
        )  # fmt: skip
        assert_same_training(plain, run)
        first, second = ((run.directory / f"decisions-{rank}").read_text().splitlines() for rank in range(2))
        assert len({line.split()[-1] for line in first}) > 2, "the plan never changed: the test shows nothing"
        assert first == second

"""megatron-swap plan: the stage of a pipeline that decides, limits among the training flags, and notes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.swap.forecast.gpus import GPUS
from megatron.swap.forecast.options import FULL, NOTHING, PLANNED, STATE, Option
from megatron.swap.forecast.stages import decide, planned_ranks
from tests.unit.cli.test_plan_output import FLAGS, LLAMA, option, planned, words

LONG = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 65536 --micro-batch-size 1 "
    "--vocab-size 256000 --bf16 --hidden-dropout 0 --pipeline-model-parallel-size 2 --max-position-embeddings 65536"
)
TWO = "--gpu h100 --num-gpus 2 --host-gib 300"


@pytest.mark.nightly
def test_the_stage_that_does_not_fit_decides(capsys: pytest.CaptureFixture[str]) -> None:
    """The last stage holds the logits of 64k tokens."""
    status, (verdict, table, *_) = planned(capsys, f"{TWO} --memory-gib 40 -- {LONG}")
    assert status == 1
    assert verdict.startswith("Does not fit in 40 of the ")
    assert verdict.splitlines()[1] == "Stage 1 of 2 does not fit (stages count from 0)."
    _, (last, same, *_) = planned(capsys, f"{TWO} --memory-gib 40 --pipeline-rank 1 -- {LONG}")
    assert (verdict, table) == (last, same)
    status, (first, *_) = planned(capsys, f"{TWO} --memory-gib 40 --pipeline-rank 0 -- {LONG}")
    assert status == 0
    assert first.splitlines()[1] == "Figures of stage 0 of 2 (stages count from 0)."


def test_a_saved_plan_says_its_stage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, parts = planned(capsys, f"{TWO} --memory-gib 40 --save {tmp_path}/plan.json -- {LONG}")
    assert status == 0
    assert "The plan is for stage 0 of 2. --pipeline-rank plans another stage." in parts


def test_stages_to_plan() -> None:
    assert planned_ranks(1, None, False) == (0,)
    assert planned_ranks(4, None, False) == (0, 3)
    assert planned_ranks(4, 2, False) == (2,)
    assert planned_ranks(4, None, True) == (0,)


def test_an_option_is_chosen_that_fits_both_stages() -> None:
    def of(name: str, ms: float, fits: bool = True) -> Option:
        return replace(option(name, ms), fits=fits)

    found = {
        0: [of(NOTHING, 1.0, fits=False), of(FULL, 4.0), of(PLANNED, 2.0), of(STATE, 3.0)],
        3: [of(NOTHING, 9.0), of(FULL, 1.0), of(PLANNED, 2.0, fits=False), of(STATE, 3.5)],
    }
    decision = decide(found, lambda options: next((one for one in options if one.fits and one.name != FULL), None))
    assert (decision.rank, decision.chosen) == (3, found[3][3])
    assert decision.unfit == {NOTHING: 0}
    slower = decide(found, lambda options: next(one for one in options if one.fits))
    assert (slower.rank, slower.chosen) == (0, found[0][1])
    assert slower.unfit == {PLANNED: 3}


def test_a_fraction_among_the_training_flags_is_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    _, (verdict, command, *_) = planned(capsys, f"--gpu h100 -- {FLAGS} --swap-memory-fraction 0.26")
    budget_gib = 0.26 * GPUS["h100"].memory_gib
    assert verdict.startswith(f"Fits in {budget_gib:.4g} of the ")
    assert words(command)[-2:] == ["--swap-memory-gib", f"{int(budget_gib * 100) / 100:g}"]


@pytest.mark.slow
def test_the_smaller_limit_of_host_memory_counts(capsys: pytest.CaptureFixture[str]) -> None:
    for host_gib, flag, smaller in (("50", "30", "30"), ("30", "50", "30")):
        line = f"--gpu h100 --memory-gib 20.5 --host-gib {host_gib} -- {FLAGS} --swap-host-gib {flag}"
        _, (_, command, *_) = planned(capsys, line)
        assert words(command)[-2:] == ["--swap-host-gib", smaller]


def test_a_missing_flag_of_megatron_is_told_behind_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    without = re.sub(r"--max-position-embeddings \d+", "", FLAGS)
    note = "Megatron also needs --max-position-embeddings (at least the sequence length)."
    assert planned(capsys, f"--gpu h200 -- {without}")[1][2] == note
    assert note not in planned(capsys, f"--gpu h200 -- {FLAGS}")[1]


SHARED = "Add --use-distributed-optimizer: the 2 data-parallel ranks then share the optimizer state."


@pytest.mark.parametrize(
    ("gpu", "flags", "is_told"),
    [("rtx4090", "", True), ("h200", "--num-layers 8", False), ("rtx4090", "--use-distributed-optimizer", False)],
)  # fmt: skip
def test_shared_optimizer_state_is_advised_once(
    capsys: pytest.CaptureFixture[str], gpu: str, flags: str, is_told: bool
) -> None:
    _, parts = planned(capsys, f"--gpu {gpu} --num-gpus 2 -- {LLAMA} {flags}")
    assert (SHARED in parts) is is_told
    assert "--use-distributed-optimizer" not in parts[0]
    assert "Communication between GPUs is not counted." in parts
    assert not any("Communication" in part for part in planned(capsys, f"--gpu {gpu} -- {FLAGS}")[1])

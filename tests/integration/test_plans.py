"""Plan files through the real trainer: followed with results equal to the bit, and saved so that a second run does the
same."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.swap.common.plan import LAYER_SECTION, Plan, PlanClass, SitePlan, load_plan, save_plan
from megatron.swap.common.types import Action, Site
from megatron.swap.forecast.flags import read_flags
from tests.integration.harness import (
    SWAP_SMALL,
    WITH_FUSION,
    Run,
    Trainer,
    arguments,
    assert_same_training,
    assert_swapped,
    assert_swaps_to_the_end,
    recorded,
)
from tests.integration.test_bad_input import assert_refused
from tests.integration.test_training import LLAMA, MOE

HIDDEN_BYTES = 64 * 2 * 64 * 4
"""Bytes of hidden states: sequence 64, micro-batch 2, width 64, fp32."""
HIDDEN_MIB = HIDDEN_BYTES / 2**20
NORMS = ("self_attention.linear_qkv/0", "mlp.linear_fc1/0")
BF16_DROPOUT = "--bf16 --attention-dropout 0.1 --hidden-dropout 0.1"
FC1_OUTPUT, ACTIVATION_OUTPUT = "mlp/0", "mlp.linear_fc2/0"


def swap(mib: float | None = None) -> SitePlan:
    return SitePlan("swap", mib)


AGAIN = SitePlan("recompute")
KEEP = SitePlan("keep")


def plan_for(flags: str, *classes: PlanClass) -> Plan:
    """Return a plan for the tiny model with ``flags``, as ``tools/plan.py`` reads them."""
    return Plan(read_flags(arguments(flags)).model, None, None, None, classes)


def by_plan(trainer: Trainer, folder: Path, flags: str, plan: Plan, *, ranks: int = 1, more: str = "") -> Run:
    path = folder / "given.json"
    save_plan(plan, path)
    return trainer.run(f"{flags} {SWAP_SMALL} --swap-plan {path} {more} {recorded('torch')}", ranks=ranks)


MIXED = (
    PlanClass("0-3", {**dict.fromkeys(NORMS, AGAIN), FC1_OUTPUT: swap(), ACTIVATION_OUTPUT: AGAIN,
                      "self_attention.core_attention/0": KEEP, "self_attention.core_attention/1": swap()}),
    PlanClass("4,6", {ACTIVATION_OUTPUT: swap()}),
    PlanClass("5", {NORMS[0]: AGAIN}),
)  # fmt: skip


@pytest.mark.supports("--swap-plan plan.json")
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param("", 1, id="fp32"),
        pytest.param(BF16_DROPOUT, 1, id="bf16-dropout"),
        pytest.param(f"{WITH_FUSION} {LLAMA}", 1, id="llama"),
        pytest.param("--tensor-model-parallel-size 2", 2, id="tp2"),
        pytest.param("--pipeline-model-parallel-size 2 --global-batch-size 8", 2, id="pp2"),
    ],
)
def test_keep_swap_and_recompute_in_one_layer(trainer: Trainer, tmp_path: Path, flags: str, ranks: int) -> None:
    plain = trainer.unswapped(flags, ranks=ranks)
    run = by_plan(trainer, tmp_path, flags, plan_for(flags, *MIXED), ranks=ranks, more="--swap-verify")
    assert_same_training(plain, run)
    assert_swapped(run)
    assert_swaps_to_the_end(run)
    summary = run.summary
    assert summary["recomputed_bytes"] > 0
    assert summary["recompute_refused"] == []
    assert set(summary["swapped_layers"]) == {0, 1, 2, 3, 4, 6}
    assert "planned, but nothing was saved there" not in run.output
    assert "saved, but not in the plan, so kept: " in run.output


def test_every_byte_is_where_the_plan_says(trainer: Trainer, tmp_path: Path) -> None:
    """The outputs of fc1 and of the activation are 4 x hidden wide. A step has two micro-batches."""
    run = by_plan(trainer, tmp_path, WITH_FUSION, plan_for(WITH_FUSION, *MIXED))
    out_bytes = [layer["swapped_out_bytes"] for layer in run.summary["layers"]]
    key = HIDDEN_BYTES  # rotated: a storage of its own
    assert out_bytes == [2 * size for size in (*4 * [4 * HIDDEN_BYTES + key], 4 * HIDDEN_BYTES, 0, 4 * HIDDEN_BYTES, 0)]
    assert run.summary["recomputed_bytes"] == 2 * HIDDEN_BYTES * (4 * (1 + 1 + 4) + 1)


@pytest.mark.parametrize(
    ("flags", "manual", "ranks"),
    [
        pytest.param("", "--swap-layers 0-5", 1, id="some-layers"),
        pytest.param("", "--swap-layers all --swap-recompute norm activation", 1, id="all-recompute"),
        pytest.param(WITH_FUSION, "--swap-layers every:2 --swap-modules mlp --swap-recompute norm", 1, id="modules"),
        pytest.param("", "--swap-layers none --swap-recompute activation", 1, id="recompute-alone"),
        pytest.param("--pipeline-model-parallel-size 2 --global-batch-size 8", "--swap-layers all", 2, id="pp2"),
        pytest.param("", "--swap-layers all", 2, id="dp2"),
    ],
)
def test_a_saved_plan_does_the_same_again(
    trainer: Trainer, tmp_path: Path, flags: str, manual: str, ranks: int
) -> None:
    save = "--swap-save-plan plans/saved.json"
    first = trainer.run(f"{flags} {SWAP_SMALL} {manual} {save} {recorded('torch')}", ranks=ranks)
    assert_same_training(trainer.unswapped(flags, ranks=ranks), first)
    saved = load_plan(first.directory / "plans" / "saved.json")
    assert saved.model == plan_for(flags).model
    again = by_plan(trainer, tmp_path, flags, saved, ranks=ranks, more=save)
    assert_same_training(first, again)
    for field in ("layers", "swapped_out_bytes", "swapped_in_bytes", "recomputed_bytes", "num_recomputed"):
        assert again.summary[field] == first.summary[field], field
    assert load_plan(again.directory / "plans" / "saved.json") == saved
    assert "--swap-plan: " not in again.output, again.tail


def test_what_is_written_is_what_was_done(trainer: Trainer) -> None:
    run = trainer.run(f"{SWAP_SMALL} --swap-layers 0-6 --swap-recompute norm --swap-save-plan saved.json "
                      f"{recorded('torch')}")  # fmt: skip
    plan = load_plan(run.directory / "saved.json")
    swapped_mib = sum(
        planned.mib or 0 for layer in range(8) for planned in plan.planned(layer).values() if planned.action == "swap"
    )
    assert 2 * swapped_mib * 2**20 == pytest.approx(run.summary["swapped_out_bytes"], rel=1e-4)
    assert plan.action(Site(3, "mlp", 0)) is Action.SWAP
    assert {plan.sites(layer)[norm] for layer in range(8) for norm in NORMS} == {Action.RECOMPUTE}
    assert not plan.swaps_layer(7)
    assert plan.planned(3)[FC1_OUTPUT].mib == 4 * HIDDEN_MIB


def test_a_plan_that_is_not_for_this_run_is_told_and_trains_to_the_bit(trainer: Trainer, tmp_path: Path) -> None:
    odd = PlanClass("0-3", {"mlp/7": swap(), FC1_OUTPUT: swap(0.1), "self_attention.core_attention/4": AGAIN,
                            "input_layernorm/0": KEEP})  # fmt: skip
    run = by_plan(trainer, tmp_path, "", plan_for("", odd))
    assert_same_training(trainer.unswapped(), run)
    told = [line.strip() for line in run.output.splitlines() if "--swap-plan: " in line or "not recomputed" in line]
    assert "swap: --swap-plan: layers 0-3: planned, but nothing was saved there: mlp/7" in told
    assert ("swap: --swap-plan: layers 0-3: of another size than planned, so what the plan predicts does not hold: "
            "mlp/0 (0.12 MiB, planned 0.10 MiB)") in told  # fmt: skip
    assert any(line.startswith("swap: --swap-plan: layers 0-3: saved, but not in the plan, so kept: ") for line in told)
    assert any("not recomputed: layers.0/self_attention.core_attention/4 and 3 more" in line for line in told)
    assert len(told) == 4, told
    # The plan asks to recompute the site, which is impossible. It is swapped, since the layer swaps.
    first = run.summary["layers"][0]["swapped_out_bytes"]
    assert first == 2 * (4 + 1) * HIDDEN_BYTES


@pytest.mark.supports(f"{MOE} --swap-plan plan.json")
def test_experts(trainer: Trainer, tmp_path: Path) -> None:
    plan = plan_for(MOE, PlanClass("0-7", {"self_attention.core_attention/0": swap(), NORMS[0]: AGAIN}))
    run = by_plan(trainer, tmp_path, MOE, plan)
    assert_same_training(trainer.unswapped(MOE), run)
    assert_swaps_to_the_end(run)


@pytest.mark.supports("--swap-plan plan.json")
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param("", 1, id="fp32"),
        pytest.param(BF16_DROPOUT, 1, id="bf16-dropout"),
        pytest.param(f"{WITH_FUSION} {LLAMA}", 1, id="llama"),
        pytest.param("--tensor-model-parallel-size 2", 2, id="tp2"),
        pytest.param("--pipeline-model-parallel-size 2 --global-batch-size 8", 2, id="pp2"),
        # Scores of three experts are summed in the order of ``topk``, which Megatron lets sort with gradients alone.
        pytest.param(MOE.replace("--moe-router-topk 2", "--moe-router-topk 3"), 1, id="three experts"),
    ],
)
def test_whole_layers_run_again(trainer: Trainer, tmp_path: Path, flags: str, ranks: int) -> None:
    plain = trainer.unswapped(flags, ranks=ranks)
    run = by_plan(trainer, tmp_path, flags, plan_for(flags, PlanClass("0-7", {}, (LAYER_SECTION,))), ranks=ranks)
    assert_same_training(plain, run)
    assert run.summary["saved_peak_bytes"] < plain.summary["saved_peak_bytes"] / 2
    assert run.summary["swapped_out_bytes"] == 0
    assert "--swap-plan: " not in run.output


@pytest.mark.parametrize("reads", ["result", "backward"])
def test_a_whole_layer_that_is_no_pure_function_ends_the_run(trainer: Trainer, tmp_path: Path, reads: str) -> None:
    """What only a backward reads is found when the layer's turn comes: one of 8 in each of two micro-batches."""
    path = tmp_path / "given.json"
    save_plan(plan_for("", PlanClass("0-7", {}, (LAYER_SECTION,))), path)
    program = Path(__file__).with_name("impure_layers_script.py")
    run = trainer.run(f"{SWAP_SMALL} --swap-plan {path} --reads {reads}", check=False, program=program)
    assert run.returncode != 0
    assert re.search(r"(layer \d, )*layer \d ran again in backward and computed something else than in", run.output)
    assert len(re.findall(r" iteration +\d+/", run.output)) == 2


def test_of_a_whole_layer_that_swaps_the_input_goes(trainer: Trainer, tmp_path: Path) -> None:
    """The bytes follow by formula from two micro-batches. The first layer's input has external references."""
    whole = PlanClass("0-5", {FC1_OUTPUT: swap()}, (LAYER_SECTION,))
    alone = by_plan(trainer, tmp_path, "", plan_for("", replace(whole, sites={})))
    run = by_plan(trainer, tmp_path, "", plan_for("", whole), more="--swap-verify")
    assert_same_training(trainer.unswapped(), run)
    assert_swaps_to_the_end(run)
    assert [layer["swapped_out_bytes"] for layer in run.summary["layers"]] == [0, *5 * [2 * HIDDEN_BYTES], 0, 0]
    assert run.summary["saved_peak_bytes"] < alone.summary["saved_peak_bytes"]


def test_a_plan_that_keeps_everything_moves_nothing(trainer: Trainer, tmp_path: Path) -> None:
    run = by_plan(trainer, tmp_path, "", plan_for("", PlanClass("0-7", {FC1_OUTPUT: KEEP})))
    assert_same_training(trainer.unswapped(), run)
    assert run.summary["swapped_out_bytes"] == run.summary["recomputed_bytes"] == 0
    assert run.summary["host_booked_bytes"] == 0
    assert "--swap-plan: " not in run.output


class TestRefusedBeforeTheModelIsBuilt:
    def test_another_model(self, trainer: Trainer, tmp_path: Path) -> None:
        plan = plan_for("", *MIXED)
        save_plan(replace(plan, model=replace(plan.model, hidden_size=128)), tmp_path / "plan.json")
        run = trainer.failing(f"--swap-plan {tmp_path / 'plan.json'}")
        assert_refused(run, "was made for another model: hidden_size is 128 there, 64 here", "Make a new plan")

    def test_more_host_memory_than_there_is(self, trainer: Trainer, tmp_path: Path) -> None:
        save_plan(plan_for("", PlanClass("0-7", {FC1_OUTPUT: swap(100.0)})), tmp_path / "plan.json")
        run = trainer.failing(f"--swap-plan {tmp_path / 'plan.json'} --swap-host-gib 0.5 --swap-host-unchecked")
        assert_refused(run, "--swap-plan", "takes at least 600 MiB", "512 MiB may be reserved", "plan that swaps less")

    def test_a_file_that_is_no_plan(self, trainer: Trainer, tmp_path: Path) -> None:
        (tmp_path / "plan.json").write_text(json.dumps({"format": "megatron-swap profile"}))
        assert_refused(trainer.failing(f"--swap-plan {tmp_path / 'plan.json'}"), "format is", "megatron-swap plan")

"""Plan files through the real trainer: followed with results equal to the bit, and saved so that a second run does the
same."""

import re
from pathlib import Path

import pytest

from megatron.swap.common.plan import Plan, PlanClass, SitePlan, load_plan, save_plan
from tests.integration.harness import SWAP_SMALL, WITH_FUSION, Run, Trainer, assert_same_training
from tests.integration.rows import AGAIN, FC1_OUTPUT, HIDDEN_BYTES, KEEP, MIXED, SWAP, WHOLE, plan_for
from tests.integration.test_mistakes import assert_told


def by_plan(trainer: Trainer, folder: Path, flags: str, plan: Plan, *, ranks: int = 1, more: str = "") -> Run:
    path = folder / "given.json"
    save_plan(plan, path)
    return trainer.live(f"{flags} {SWAP_SMALL} --swap-plan {path} {more}", ranks=ranks)


@pytest.mark.short
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
        pytest.param(WITH_FUSION, "--swap-layers every:2 --swap-modules mlp --swap-recompute norm", 1, id="modules"),
        pytest.param("--pipeline-model-parallel-size 2 --global-batch-size 8", "--swap-layers all", 2, id="pp2",
                     marks=pytest.mark.nightly),
    ],
)
def test_a_saved_plan_does_the_same_again(
    trainer: Trainer, tmp_path: Path, flags: str, manual: str, ranks: int
) -> None:
    save = "--swap-save-plan plans/saved.json"
    _, first = trainer.pair(flags, f"{manual} {save}", ranks=ranks)
    saved = load_plan(first.directory / "plans" / "saved.json")
    assert saved.model == plan_for(flags).model
    again = by_plan(trainer, tmp_path, flags, saved, ranks=ranks, more=save)
    assert_same_training(first, again)
    for field in ("layers", "swapped_out_bytes", "swapped_in_bytes", "recomputed_bytes", "num_recomputed"):
        assert again.summary[field] == first.summary[field], field
    assert load_plan(again.directory / "plans" / "saved.json") == saved
    assert "--swap-plan: " not in again.output, again.tail


def test_a_plan_that_is_not_for_this_run_is_told_and_trains_to_the_bit(trainer: Trainer, tmp_path: Path) -> None:
    odd = PlanClass("0-3", {"mlp/7": SWAP, FC1_OUTPUT: SitePlan("swap", 0.1), "self_attention.core_attention/4": AGAIN,
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


def test_a_whole_layer_that_is_no_pure_function_ends_the_run(trainer: Trainer, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    save_plan(plan_for("", *WHOLE), path)
    program = Path(__file__).with_name("impure_layers_script.py")
    run = trainer.run(f"{SWAP_SMALL} --swap-plan {path}", check=False, program=program)
    assert run.returncode != 0
    assert re.search(r"(layer \d, )*layer \d ran again in backward and computed something else than in", run.output)
    assert len(re.findall(r" iteration +\d+/", run.output)) == 2


def test_a_plan_that_host_memory_has_no_room_for_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    plan = plan_for("", PlanClass("0-7", {FC1_OUTPUT: SitePlan("swap", 100.0)}))
    save_plan(plan, tmp_path / "plan.json")
    run = trainer.refused(f"--swap-plan {tmp_path / 'plan.json'} --swap-host-gib 0.5 --swap-host-unchecked")
    assert_told(run.output, ["takes at least 600 MiB", "512 MiB may be reserved", "plan that swaps less"])

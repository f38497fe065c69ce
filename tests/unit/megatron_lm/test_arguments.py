"""Combinations of flags for plans and budgets, and the messages of refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.swap.common.plan import Model, Plan, PlanClass, SitePlan, save_plan
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import PRODUCERS, UsageError
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.checks import device_memory_gib, recompute_kinds
from megatron.swap.trainer.checks import check_forward_step, check_is_gpt
from megatron.swap.trainer.command_line import swap_config
from tests.megatron_args import parsed

MODEL = Model(8, 64, 256, 4, 4, 64, 2, 256, "local", "fp32", gated=False)
PLAN = Plan(MODEL, None, None, None, (PlanClass("0-1", {"mlp/0": SitePlan("swap"), "norm/0": SitePlan("recompute")}),))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has a plan in it."""
    monkeypatch.chdir(tmp_path)
    save_plan(PLAN, "plan.json")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ("", {"auto": False, "acts": False, "plan": None}),
        ("--swap-policy auto --swap-memory-fraction 1", {"auto": True, "memory_fraction": 1.0, "max_candidates": 3}),
        ("--swap-memory-gib 1 --swap-max-candidates 10 --swap-save-profile a/b.json",
         {"max_candidates": 10, "save_profile": "a/b.json"}),
        ("--swap-plan plan.json", {"auto": False, "acts": True, "plan": PLAN}),
        ("--swap-plan plan.json --swap-policy manual --swap-save-plan new/plan.json", {"save_plan": "new/plan.json"}),
    ],
)  # fmt: skip
def test_what_goes_together(folder: Path, flags: str, fields: dict) -> None:
    config = swap_config(parsed(flags))
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--swap-plan plan.json --swap-layers 0-3", "plan.json cannot be combined with --swap-layers 0-3: the plan"),
        ("--swap-plan plan.json --swap-policy auto", "cannot be combined with --swap-policy auto: the plan"),
        ("--swap-policy auto --swap-layers all", "auto cannot be combined with --swap-layers all: the planner"),
        ("--swap-memory-gib 4 --swap-memory-fraction 0.5", "--swap-memory-gib 4 and --swap-memory-fraction 0.5 both"),
        ("--swap-memory-gib 4 --swap-policy manual", "--swap-memory-gib lets the planner decide; --swap-policy manual"),
        ("--swap-memory-gib nan", "--swap-memory-gib nan: must be a number of GiB above 0"),
        ("--swap-memory-gib 1e6", "--swap-memory-gib 1e+06: must be at most what the device has"),
        ("--swap-memory-fraction 1.01", "--swap-memory-fraction 1.01: must be above 0 and at most 1"),
        ("--swap-policy auto --swap-max-candidates 11", "--swap-max-candidates 11: must be 1 to 10"),
        ("--swap-layers 0 --swap-max-candidates 5", "--swap-max-candidates 5: only the planner tries plans. Add"),
        ("--swap-save-plan new.json", "--swap-save-plan new.json: nothing is swapped or recomputed"),
        ("--swap-layers 0 --swap-save-plan plan.json/new", "plan.json is none"),
        ("--swap-plan plan.json --swap-save-plan ./plan.json", "must be another file than that of --swap-plan, which"),
        ("--swap-layers 0 --swap-save-profile p.json", "only the planner measures a profile"),
        ("--swap-plan none.json", "none.json: cannot be read (No such file or directory)"),
        ("--swap-optimizer 1.5", "--swap-optimizer 1.5: must be a fraction of the state, 0 to 1"),
        ("--swap-optimizer 1 --swap-disk-dir none", "--swap-disk-dir none: must be a folder that is there"),
        ("--swap-modules mlp", "--swap-modules mlp has no effect without --swap-layers. Add"),
        ("--swap-disk-dir .", "--swap-disk-dir .: must be given with --swap-optimizer or what swaps activations"),
        ("--swap-optimizer 1 --swap-disk-gib 5", "--swap-disk-gib 5.0: must be given with --swap-disk-dir DIR"),
    ],
)  # fmt: skip
def test_what_does_not(folder: Path, flags: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        swap_config(parsed(flags))
    assert message in str(refusal.value)


@pytest.mark.parametrize("ours", ["--swap-plan plan.json", "--swap-memory-gib 1"])
@pytest.mark.parametrize(
    ("theirs", "flag"),
    [
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        ({"expert_gtp_weight_remat_size": 2}, "--expert-tensor-parallel-num-weight-shards"),
        ({"hybrid_layer_pattern": "M*-/M"}, "--hybrid-layer-pattern M*-/M"),
        ({"cpu_offloading_num_layers": 2}, "--cpu-offloading-num-layers 2"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, "--recompute-granularity"),
    ],
)
def test_what_of_megatrons_does_not_go_with_a_plan(folder: Path, ours: str, theirs: dict, flag: str) -> None:
    with pytest.raises(UsageError) as refusal:
        swap_config(parsed(ours, **theirs))
    assert str(refusal.value).startswith(f"{ours} cannot be combined with {flag}")
    assert f"Drop {flag}, or drop {ours.split()[0]}." in str(refusal.value)


def test_flags_that_a_gpt_would_ignore_are_refused() -> None:
    check_is_gpt(parsed(""))
    with pytest.raises(UsageError, match=r"^--hybrid-layer-pattern M\*: .* would ignore it\. Drop it, or give"):
        check_is_gpt(parsed("", hybrid_layer_pattern="M*"))


def test_a_schedule_of_layers_in_parts_needs_a_forward_step_that_plans() -> None:
    args = parsed("", overlap_moe_expert_parallel_comm=True)
    with pytest.raises(UsageError, match=r"^--overlap-moe-expert-parallel-comm: .*return_schedule_plan=True.* Drop"):
        check_forward_step(args, lambda data, model: None)
    check_forward_step(args, lambda data, model, return_schedule_plan=False: None)
    check_forward_step(parsed(""), lambda data, model: None)


def test_a_plan_for_another_model_is_refused_with_the_difference(folder: Path) -> None:
    said = "made for another model: seq_length is 64 there, 128 here; dtype is fp32 there, bf16 here. Make a new plan"
    with pytest.raises(UsageError, match=said):
        swap_config(parsed("--swap-plan plan.json", seq_length=128, bf16=True))


def test_a_section_that_training_cannot_run_again_is_refused(folder: Path) -> None:
    save_plan(replace(PLAN, classes=(PlanClass("2", {}, ("layer",)),)), "plan.json")
    assert swap_config(parsed("--swap-plan plan.json")).acts
    save_plan(replace(PLAN, classes=(PlanClass("2", {}, ("mlp",)),)), "plan.json")
    with pytest.raises(UsageError, match="layer 2: section 'mlp' cannot be recomputed in training; allowed is 'layer'"):
        swap_config(parsed("--swap-plan plan.json"))


def test_the_budget_in_gib() -> None:
    assert device_memory_gib(MegatronFacts.of(vars(parsed(""))), Settings()) > 0.1
    for flags, budget_gib in (
        ("--swap-policy auto", 0.95), ("--swap-memory-fraction 0.5", 0.5), ("--swap-memory-gib 0.1", 0.1),
    ):  # fmt: skip
        assert swap_config(parsed(flags)).budget_gib(1.0) == budget_gib
    with pytest.raises(UsageError, match=r"--swap-memory-gib 0\.1"):
        swap_config(parsed("--swap-memory-gib 0.1 --swap-cpu-memory-gib 0.05"))


def test_the_kinds_that_have_to_tell(folder: Path) -> None:
    def kinds(flags: str, **theirs: object) -> tuple[str, ...]:
        args = parsed(flags, **theirs)
        return recompute_kinds(MegatronFacts.of(vars(args)), swap_config(args))

    assert kinds("--swap-layers all") == ()
    assert kinds("--swap-recompute norm") == ("norm",)
    in_bf16 = tuple(kind for kind in PRODUCERS if kind != "quantized")
    assert kinds("--swap-plan plan.json") == kinds("--swap-policy auto") == in_bf16
    unfused = kinds("--swap-policy auto", swiglu=True, bias_swiglu_fusion=False)
    assert unfused == tuple(kind for kind in in_bf16 if kind != "activation")
    assert kinds("--swap-policy auto", fp8="hybrid", fp8_recipe="tensorwise") == PRODUCERS
    assert kinds("--swap-policy auto", fp8="hybrid") == PRODUCERS[:-2]  # delayed scaling


@pytest.mark.parametrize(
    ("theirs", "flag"),
    [
        ({"log_params_norm": True}, "--log-params-norm"),
        ({"async_save": True}, "--async-save"),
        ({"qk_clip": True}, "--qk-clip"),
        ({"fp8_param_gather": True, "fp8_recipe": "mxfp8"}, "--fp8-param-gather with --fp8-recipe mxfp8"),
        ({"fp8_param_gather": True, "use_precision_aware_optimizer": True},
         "--use-precision-aware-optimizer with --fp8-param-gather and --fp8-recipe delayed"),
        ({"fp4_param_gather": True}, "--fp4-param-gather"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
    ],
)
def test_what_of_megatrons_does_not_go_with_optimizer_state_that_rests(theirs: dict, flag: str) -> None:
    with pytest.raises(UsageError) as refusal:
        swap_config(parsed("--swap-optimizer 0.5", **theirs))
    assert str(refusal.value).startswith(f"--swap-optimizer 0.5 cannot be combined with {flag}: ")
    assert swap_config(parsed("", **theirs)).optimizer == 0


def test_scales_that_megatrons_checkpoints_lose_are_refused() -> None:
    theirs = {"exp_avg_dtype": torch.uint8, "use_precision_aware_optimizer": True, "fp8_recipe": "blockwise"}
    with pytest.raises(UsageError, match="with --fp8-recipe blockwise and state in fp16 or 8 bits: Megatron's check"):
        swap_config(parsed("--swap-optimizer 1", **theirs))
    swap_config(parsed("--swap-optimizer 1", **{**theirs, "fp8_recipe": "delayed"}))


@pytest.mark.parametrize("name", ["exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"])
def test_state_with_scales_does_not_go_to_disk(name: str, tmp_path: Path) -> None:
    theirs = {name: torch.uint8, "use_precision_aware_optimizer": True}
    on_disk = f"--swap-optimizer 0.5 --swap-disk-dir {tmp_path}"
    with pytest.raises(UsageError, match="--swap-disk-dir with state in fp16 or 8 bits: a scale belongs to a whole"):
        swap_config(parsed(on_disk, **theirs))
    assert swap_config(parsed("--swap-optimizer 0.5", **theirs)).optimizer == 0.5
    assert swap_config(parsed(on_disk)).optimizer == 0.5


def test_memory_of_the_emulated_device_is_refused_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="--swap-cpu-memory-gib 2: the flag is for machines without a GPU"):
        swap_config(parsed("--swap-layers 0 --swap-cpu-memory-gib 2"))

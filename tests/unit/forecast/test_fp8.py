"""FP8 layers: what they save, how long they take, and the memory of their weights. TransformerEngine is not needed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.swap.common.types import GIB, MIB, UsageError
from megatron.swap.forecast import shape
from megatron.swap.forecast.flags import read_flags
from megatron.swap.forecast.fp8 import RECIPES, RECOMPUTE_INPUTS
from megatron.swap.forecast.gpus import find_gpu
from megatron.swap.forecast.options import PLANNED, of_training, states_on
from megatron.swap.forecast.shape import shape_profile
from megatron.swap.planner.profile import LayerClass, Profile
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import empty_plan

ROOT = Path(__file__).resolve().parents[3]
H, FFN, KV, TOKENS, LAYERS = 4096, 14336, 1024, 8192, 14
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {H} --ffn-hidden-size {FFN} --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --vocab-size 128256 --swiglu --bf16 --seq-length 8192 "
    "--micro-batch-size 1 --global-batch-size 4 --untie-embeddings-and-output-weights --use-distributed-optimizer"
)
"""14 layers of the 8B: 4.1 billion parameters."""
FP8 = "--fp8-format hybrid --fp8-recipe"
H200 = find_gpu("h200")
IN_FP8 = {"self_attention.linear_qkv/1": H, "mlp.linear_fc1/1": H, "mlp.linear_fc2/0": FFN}
"""Values of a token that are saved in 8 bits. With ``delayed`` the input of linear_proj is, too."""
PROJ = {"self_attention.linear_proj/0": H}
IN_BF16 = {
    "self_attention.linear_qkv/0": H, "self_attention.core_attention.fused_attention/0": H,
    "self_attention.core_attention.fused_attention/1": KV, "self_attention.core_attention.fused_attention/2": KV,
    "self_attention.core_attention.fused_attention/3": H, "mlp.linear_fc1/0": H, "mlp/0": 2 * FFN,
}  # fmt: skip
ATTENTION = {"self_attention.core_attention.fused_attention/6": 32 * 4}
"""Bytes of a token: the log-sum-exp of attention, in fp32."""


def profile_of(more: str = "", gpu: str = "h200", flags: str = FLAGS) -> Profile:
    training, found = read_flags(f"{flags} {more}".split()), find_gpu(gpu)
    return shape_profile(
        training.model, found, training.num_micro_batches, tied=training.tied, states=states_on(training, found)
    )


def inner(profile: Profile) -> LayerClass:
    return profile.layers[-1]


def token_bytes(entry: LayerClass) -> dict[str, float]:
    return {site.site: site.mib * MIB / TOKENS for site in entry.sites}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_inputs_of_linear_layers_are_saved_in_8_bits_and_all_else_in_bf16(recipe: str) -> None:
    """Arithmetic of its own: the tables above are read from TransformerEngine's modules."""
    expected = IN_FP8 | {site: 2 * num for site, num in IN_BF16.items()} | ATTENTION
    entry = inner(profile_of(f"{FP8} {recipe}"))
    assert token_bytes(entry) == pytest.approx(expected | (PROJ if recipe == "delayed" else {}))
    needed = {site.site: site.needed_at_ms for site in entry.sites}
    context, queries = (needed[f"self_attention.core_attention.fused_attention/{i}"] for i in (3, 0))
    assert (context < queries) is (recipe == "tensorwise")  # the backward of linear_proj reads it


def test_block_scales_are_sites_of_their_own() -> None:
    expected = IN_FP8 | {site: 2 * num for site, num in IN_BF16.items()} | ATTENTION
    for site, num in IN_FP8.items():
        path, ordinal = site.split("/")
        expected[f"{path}/{int(ordinal) + 1}"] = 4 * num / 128
    assert token_bytes(inner(profile_of(f"{FP8} blockwise"))) == pytest.approx(expected)


UNSWAPPED = [
    json.loads(line)
    for line in (ROOT / "docs/results/h200-fp8.jsonl").read_text().splitlines()
    if json.loads(line)["method"] == "none"
]


@pytest.mark.parametrize("row", UNSWAPPED, ids=[row["case"] for row in UNSWAPPED])
def test_unswapped_steps_in_fp8_are_predicted(row: dict[str, Any]) -> None:
    """Two shapes, two recipes: the runs that the speeds were fitted to."""
    training = read_flags(row["flags"].split())
    states = states_on(training, H200)
    made = shape_profile(training.model, H200, training.num_micro_batches, states=states, fuses_gradients=True)
    assert simulate(made, empty_plan(made)).step_ms == pytest.approx(row["step_ms_median"], rel=0.02)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_weights_without_copies_take_their_time_in_each_micro_batch(recipe: str) -> None:
    """Forward makes one layout, backward two, in place of two once a step. There is one weight's copy at a time."""
    flags = f"{FP8} {recipe}"
    kept, made = profile_of(flags), profile_of(f"{flags} --swap-fp8-weights recompute")
    weights = H * (2 * H + 2 * KV) + 3 * H * FFN
    reads = 4 if recipe == "tensorwise" else 2
    per_value_ms = weights / 3400e6
    assert kept.static_gib - made.static_gib == pytest.approx(2 * LAYERS * weights / GIB)
    assert inner(made).forward_ms - inner(kept).forward_ms == pytest.approx((reads + 1) * per_value_ms)
    assert inner(made).backward_ms - inner(kept).backward_ms == pytest.approx((reads + 2) * per_value_ms)
    once_ms = kept.non_layer.optimizer_ms - made.non_layer.optimizer_ms
    assert once_ms == pytest.approx(LAYERS * (reads + 2) * per_value_ms)
    more_mib = max(b for _, b in inner(made).temporaries) - max(b for _, b in inner(kept).temporaries)
    assert more_mib == pytest.approx(2 * 2 * H * FFN / MIB)  # linear_fc1 has two of these
    assert inner(made).forward_peak_mib - inner(kept).forward_peak_mib == pytest.approx(2 * H * FFN / MIB)
    assert made.model != kept.model, "a plan of the one is refused for the other"
    assert made.fragments_gib == profile_of().fragments_gib


def test_copies_of_weights_leave_holes() -> None:
    """Without a measurement. What a run has measured counts in their place, up to the most that was seen."""
    bf16, fp8 = profile_of(), profile_of(f"{FP8} tensorwise")
    weights_gib = LAYERS * (H * (2 * H + 2 * KV) + 3 * H * FFN) / GIB
    assert fp8.fragments_gib == pytest.approx(max(0.3 * weights_gib, bf16.fragments_gib))
    assert fp8.fragments_gib > bf16.fragments_gib
    assert fp8.fragments_gib + fp8.reserve_gib == pytest.approx(max(0.5 * weights_gib, 2.25 * bf16.fragments_gib))
    measured = replace(fp8, allocator_gib=0.1)
    assert measured.fragments_gib == bf16.fragments_gib
    assert measured.fragments_gib + measured.reserve_gib == pytest.approx(
        max(0.5 * weights_gib, 3 * bf16.fragments_gib)
    )


@pytest.mark.parametrize(
    ("flags", "gpu", "bytes_more"),
    [("tensorwise", "h200", 2), ("blockwise", "h200", 2), ("tensorwise --fp8-param-gather", "h200", 0),
     ("tensorwise", "b200", 1), ("delayed --fp8-param-gather", "b200", -1)],
)  # fmt: skip
def test_weights_in_both_layouts_are_static_memory(flags: str, gpu: str, bytes_more: int) -> None:
    """Bf16 weights stay beside their FP8 copies, unless weights are FP8. Blackwell needs no transposed copy."""
    num_linear = LAYERS * (H * (2 * H + 2 * KV) + 3 * H * FFN)
    more_gib = profile_of(f"{FP8} {flags}", gpu).static_gib - profile_of("", gpu).static_gib
    assert more_gib == pytest.approx(bytes_more * num_linear / GIB)


def test_first_and_last_layers_stay_in_bf16() -> None:
    bf16 = inner(profile_of())
    profile = profile_of(f"{FP8} tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2")
    assert [entry.layers for entry in profile.layers] == [(0,), (12, 13), tuple(range(1, 12))]
    assert [entry.saved_mib == bf16.saved_mib for entry in profile.layers] == [True, True, False]
    assert profile.layers[1].sites == bf16.sites
    assert profile.model.bf16_layers == (0, 12, 13)
    num_linear = 11 * (H * (2 * H + 2 * KV) + 3 * H * FFN)
    assert profile.static_gib - profile_of().static_gib == pytest.approx(2 * num_linear / GIB)


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_values_are_recomputed_and_linear_layers_except_with_delayed_scaling(recipe: str) -> None:
    """The engine refuses to run a linear layer twice where that would write the next step's scales."""
    profile = profile_of(f"{FP8} {recipe}")
    reads = 2 if recipe == "tensorwise" else 1
    expected = {
        site: TOKENS * num * (2 * reads + 2 + 2 + 2 * of) / 3400e6
        for site, num, of in (
            ("self_attention.linear_qkv/1", H, 1), ("mlp.linear_fc1/1", H, 1), ("mlp.linear_fc2/0", FFN, 2),
        )
    }  # fmt: skip
    sections = ["layer"]
    if recipe == "delayed":
        expected |= {site: TOKENS * num * (2 + 2) / 3400e6 for site, num in PROJ.items()}
    else:
        expected["mlp/0"] = shape.kernel_ms(profile.model, H200)["fc1"]
        sections = ["qkv", "residual", "layer"]
    entry = inner(profile)
    costs = {site.site: site.recompute_ms for site in entry.sites if site.recompute_ms is not None}
    assert costs == pytest.approx(expected)
    assert [part.name for part in entry.sections] == sections
    needs = {site.site: site.recompute_needs for site in entry.sites if site.recompute_ms is not None}
    assert needs == {site: RECOMPUTE_INPUTS[site] for site in expected}


@pytest.mark.parametrize(
    ("flags", "budget_gib", "is_dropped"),
    [
        pytest.param("blockwise", 77.7, True, marks=pytest.mark.nightly), ("tensorwise", 120.0, False),
        pytest.param("tensorwise --swap-fp8-weights keep", 77.7, False, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_the_planner_drops_copies_of_weights_where_that_is_faster(
    flags: str, budget_gib: float, is_dropped: bool
) -> None:
    training = read_flags(f"{FLAGS} {FP8} {flags}".split())
    unswapped, _, planned, *_ = of_training(training, H200, budget_gib, 64.0)
    assert ("--swap-fp8-weights" in planned.flags) == is_dropped
    assert unswapped.profile.model.keeps_fp8_weights
    assert planned.profile.model.keeps_fp8_weights != is_dropped
    if planned.solution is not None:
        assert planned.solution.plan.model == planned.profile.model


@pytest.mark.parametrize(
    ("gpu", "recipe", "message"),
    [("a100-80", "tensorwise", "NVIDIA A100 80 GB SXM has no FP8 in the table. Leave it out, or choose one of h200"),
     ("rtx4090", "blockwise", "--fp8-recipe blockwise: is not known on NVIDIA GeForce RTX 4090. Known there: tensorw")],
)  # fmt: skip
def test_gpus_without_fp8_are_refused(gpu: str, recipe: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        profile_of(f"{FP8} {recipe}", gpu)


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--fp8-recipe mxfp8", "--fp8-recipe mxfp8: its memory and time are not known .* tensorwise, delayed, blockwise"),
     ("--first-last-layers-bf16", "Megatron refuses it with --fp8-recipe delayed"),
     ("--exp-avg-dtype bf16", "--exp-avg-dtype bf16: Megatron needs --use-precision-aware-optimizer")],
)  # fmt: skip
def test_flags_are_refused(flags: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_flags(f"{FLAGS} --fp8-format hybrid {flags}".split())


# ------------------------------------------------------------------------ types of optimizer state


@pytest.mark.parametrize(
    ("flags", "state", "gradient"),
    [
        ("", 12, 4),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 6, 4),
        ("--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16", 5, 4),
        (f"--use-precision-aware-optimizer {FP8} delayed --fp8-param-gather", 12, 4),
        (f"--use-precision-aware-optimizer {FP8} tensorwise --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 8, 4),
    ],
)
def test_bytes_of_optimizer_state(flags: str, state: int, gradient: int) -> None:
    """TransformerEngine keeps 16 bits of the main value beside a bf16 weight, and all of it beside an FP8 weight."""
    states = read_flags(f"{FLAGS} {flags}".split()).states
    assert (states.state_bytes, states.gradient_bytes) == (state, gradient)


@pytest.mark.parametrize(
    ("flags", "stays"),
    [(f"{FP8} tensorwise --exp-avg-dtype fp8", "--fp8-recipe tensorwise and --exp-avg-dtype fp8"),
     (f"{FP8} delayed --exp-avg-dtype fp8", None),
     (f"{FP8} delayed --fp8-param-gather", "--fp8-param-gather with --fp8-recipe delayed"),
     ("--exp-avg-dtype bf16", None), (f"{FP8} tensorwise --fp8-param-gather", None)],
)  # fmt: skip
def test_state_that_cannot_be_offloaded_is_not_offered(flags: str, stays: str | None) -> None:
    given = f"{FLAGS} --use-precision-aware-optimizer {flags}"
    training = read_flags(given.split())
    assert training.state_stays == stays
    if stays is None:
        assert read_flags(f"{given} --swap-optimizer auto".split()).offloads
        return
    assert [one.name for one in of_training(training, H200, 60.0, 64.0)][-1] == PLANNED
    with pytest.raises(UsageError, match=f"--swap-optimizer auto cannot be combined with {stays}. Drop one"):
        read_flags(f"{given} --swap-optimizer auto".split())

"""Attention by library: its workspace in backward, by hand, and the block that no free piece of memory can hold."""

from dataclasses import replace

import pytest

from megatron.swap.common.plan import Model, Plan, PlanClass, SitePlan
from megatron.swap.common.types import GIB, MIB
from megatron.swap.forecast.flags import not_counted, read_flags
from megatron.swap.forecast.gpus import find_gpu
from megatron.swap.forecast.shape import layer_class, shape_profile
from megatron.swap.planner.profile import LayerClass, Profile
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import empty_plan

H200 = find_gpu("h200")
TOKENS = 131072
FLAGS = (
    "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --bf16 --micro-batch-size 1 --vocab-size 32000 --hidden-dropout 0 "
    f"--seq-length {TOKENS} --mlp-chunks-for-training 8 --swap-loss-chunks 16"
)
QUERY, KEY, SUMS = (TOKENS * num * 2 / GIB for num in (4096, 1024, 64))
"""GiB; of the logarithms of sums in fp32, 32 heads."""


def model(more: str = "") -> Model:
    return read_flags(f"{FLAGS} {more}".split()).model


def peak_of_attention(entry: LayerClass) -> float:
    """Return the GiB beside saved tensors when attention's backward begins."""
    at_ms = next(one.needed_at_ms for one in entry.sites if one.site.endswith("attention/0"))
    return next(mib for begin_ms, mib in entry.temporaries if begin_ms == at_ms) * MIB / GIB


@pytest.mark.parametrize(
    ("more", "workspace"),
    [
        ("", 4 * QUERY + SUMS),  # 4.0156 GiB were traced, in one block
        ("--attention-backend flash", 2 * QUERY + 4 * KEY + 2 * SUMS),  # 3.03
        ("--num-query-groups 32 --attention-backend flash", 2 * QUERY + 2 * SUMS),
    ],
)
def test_what_backward_holds(more: str, workspace: float) -> None:
    of_model = model(more)
    keys = 2 * KEY * of_model.num_query_groups / 8
    # Besides: gradients of the layer's output and of the context, of queries, keys and values.
    assert peak_of_attention(layer_class(of_model, H200, (0,))) == pytest.approx(3 * QUERY + keys + workspace)


def test_flash_attention_saves_elsewhere_and_is_faster() -> None:
    fused, flash = (layer_class(model(more), H200, (0,)) for more in ("", "--attention-backend flash"))
    paths = {one.site.rpartition("/")[0] for one in flash.sites} - {one.site.rpartition("/")[0] for one in fused.sites}
    assert paths == {"self_attention.core_attention.flash_attention"}
    assert flash.saved_mib == fused.saved_mib
    # 248.4 and 227.4 ms were measured in forward, 659.3 and 576.0 in backward.
    assert fused.forward_ms - flash.forward_ms == pytest.approx(21, rel=0.1)
    assert fused.backward_ms - flash.backward_ms == pytest.approx(83, rel=0.1)
    for entry, name in ((fused, "fused"), (flash, "flash")):
        context = f"self_attention.core_attention.{name}_attention/3"
        assert any(context in part.needs for part in entry.sections), name


def shaped(more: str = "") -> Profile:
    return shape_profile(model(more), H200, 1, loss_chunks=16)


def swapping(profile: Profile) -> Plan:
    """Return a plan that swaps the MLP's first tensor in every layer but the last."""
    return replace(empty_plan(profile), classes=(PlanClass("1-2", {"mlp/0": SitePlan("swap", 896.0)}),))


@pytest.mark.parametrize(("more", "block_gib"), [("", 4 * QUERY), ("--attention-backend flash", 2 * QUERY)])
def test_the_block_counts_where_something_is_swapped(more: str, block_gib: float) -> None:
    profile = shaped(more)
    assert profile.fragments_gib == pytest.approx(QUERY)  # the largest tensor
    assert profile.attention_block_gib == pytest.approx(block_gib)
    assert profile.reserve_gib == pytest.approx(block_gib / 8)
    kept, swapped = simulate(profile, empty_plan(profile)), simulate(profile, swapping(profile))
    assert (kept.fragments_gib, swapped.fragments_gib) == pytest.approx((QUERY, block_gib))


def test_which_flag_chooses_it() -> None:
    assert model("--attention-backend flash").flash_attention
    for more in ("", "--attention-backend fused", "--attention-backend auto"):
        assert model(more) == model()
    assert not model("--attention-backend flash --transformer-impl local").flash_attention
    assert not_counted(f"{FLAGS} --attention-backend flash".split()) == []
    assert not_counted(f"{FLAGS} --attention-backend unfused".split()) == ["--attention-backend unfused"]

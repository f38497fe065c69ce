"""Ranks without layers (a pipeline stage of the embedding or the loss), or whose layers run no backward (only the head
is trained): nothing can be planned there, and the budget still holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.swap.common.plan import Infeasible
from megatron.swap.common.types import GIB, MIB
from megatron.swap.forecast.options import without_planner
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.forecast.what_if import with_tokens
from megatron.swap.planner.profile import Device, Link, Pipeline, Profile, save_profile
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import curve, empty_plan, smallest_budget, solve, whole_layers
from megatron.swap.profiling.profile_builder import build_profile
from megatron.swap.profiling.recording import Recording, What
from tests.unit.planner.cases import model
from tests.unit.profiling.handwritten import STATIC, Layer, Script


def recorded(layers: tuple[Layer, ...] = ()) -> Recording:
    """Two micro-batches that hold 100 MiB at most, of ``layers`` that only run forward, and an optimizer's 60 MiB."""
    script = Script().note(What.STEP)
    for _ in range(2):
        script.note(What.CHUNK_BEGIN).after(3).use(20)
        for layer in layers:
            script.note(What.FORWARD_BEGIN, pass_key=layer.key).blip(80)
            script.note(What.FORWARD_END, pass_key=layer.key)
        script.note(What.CHUNK_END).after(2).blip(0 if layers else 80).use(-20)
    return script.blip(60).note(What.STEP).recording


def built(pipeline: Pipeline, layers: tuple[Layer, ...] = ()) -> Profile:
    return build_profile(
        recorded(layers), model(), Link(1, 1, 1, 1), Device("made up", 80.0), num_micro_batches=2, source="by hand",
        pipeline=pipeline, whole_layers=True,
    )  # fmt: skip


CASES = {
    "embedding": (Pipeline(2, 0, ((),)), ()),
    "loss": (Pipeline(2, 1, ((),)), ()),
    "of virtual stages": (Pipeline(2, 1, ((), ())), ()),
    "head": (Pipeline(1, 0, ((),)), (Layer(0), Layer(1))),
}


@pytest.mark.parametrize("case", CASES)
def test_the_measured_peak_is_the_only_plan(tmp_path: Path, case: str) -> None:
    of = built(*CASES[case])
    assert of.layers == ()
    peak_gib = (STATIC + 100 * MIB) / GIB
    assert simulate(of, empty_plan(of)).peak_gib == pytest.approx(peak_gib)
    assert simulate(of, empty_plan(of)).peak_at == "outside the layers"
    (plan,) = solve(of, 1.01 * peak_gib).plans
    assert plan.keeps_all
    assert whole_layers(of, 1.01 * peak_gib) is not None
    assert whole_layers(of, 0.99 * peak_gib) is None
    with pytest.raises(Infeasible, match="the smallest budget that was found feasible is") as refused:
        solve(of, 0.99 * peak_gib)
    assert refused.value.smallest_gib == pytest.approx(peak_gib, rel=0.01)
    save_profile(of, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == of


def test_what_the_plan_command_asks_of_it() -> None:
    of = built(*CASES["loss"])
    (nothing,) = without_planner(of, 2.0, None, gradients_gib=0.1)
    assert nothing.fits
    assert len(curve(of, 3)) == 3
    longer = with_tokens(of, seq_length=2 * of.model.seq_length)
    assert longer.optimizer_gib == pytest.approx(2 * of.optimizer_gib)
    assert smallest_budget(longer) > smallest_budget(of)

"""Plan files: round trips, and errors that name the wrong key."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.swap.common.layer_ranges import format_ranges
from megatron.swap.common.plan import Model, Plan, PlanClass, Predicted, SitePlan, check_model, load_plan, save_plan
from megatron.swap.common.types import MIB, Action, Site, UsageError
from tests.sizes import sized

MODEL = Model(16, 4096, 11008, 32, 32, 4096, 4, 32000, "transformer_engine", "bf16", gated=True)
PLAN = Plan(
    MODEL, 24.0, "0" * 64, Predicted(23.5, 1325.25, 1324.0, 9.0),
    (
        PlanClass("0-2,5", {"mlp/0": SitePlan("swap", 688.0, "13 ms on the link"), "norm/0": SitePlan("recompute")}),
        PlanClass("3-4", {"mlp.linear_fc1/0": SitePlan("keep")}, ("mlp",)),
    ),
)  # fmt: skip


def written(folder: Path, change: Any = None, plan: Plan = PLAN) -> Path:
    """Write a plan file; ``change`` edits its JSON."""
    path = folder / "plan.json"
    save_plan(plan, path)
    if change is not None:
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
    return path


SITES = st.dictionaries(
    st.from_regex(r"[a-z_]+(\.[a-z_0-9]+)*/[0-9]", fullmatch=True),
    st.builds(SitePlan, st.sampled_from(["keep", "swap", "recompute"]), st.none() | st.floats(0, 1e6),
              st.none() | st.text(max_size=20)),
    max_size=4,
)  # fmt: skip


@settings(max_examples=sized(10, 10, 40), deadline=None)
@given(entries=st.lists(SITES, min_size=1, max_size=4), budget=st.none() | st.floats(0, 1e4), data=st.data())
def test_a_plan_round_trips_exactly(tmp_path_factory: Any, entries: list, budget: float | None, data: Any) -> None:
    layers = data.draw(st.permutations(range(16)))
    size = 16 // len(entries)
    classes = tuple(
        PlanClass(format_ranges(layers[i * size : (i + 1) * size]), sites, data.draw(st.sampled_from([(), ("mlp",)])))
        for i, sites in enumerate(entries)
    )
    plan = replace(PLAN, budget_gib=budget, classes=classes, prefetch_gib=data.draw(st.none() | st.floats(1e-6, 1e3)))
    assert load_plan(written(tmp_path_factory.mktemp("plan"), plan=plan)) == plan


def test_actions_of_sites_and_layers() -> None:
    assert PLAN.action(Site(5, "mlp", 0)) is Action.SWAP
    assert PLAN.action(Site(5, "norm", 0)) is Action.RECOMPUTE
    assert PLAN.action(Site(5, "norm", 1)) is Action.KEEP
    assert PLAN.action(Site(9, "mlp", 0)) is Action.KEEP
    assert PLAN.sections(3) == ("mlp",)
    assert PLAN.sections(9) == ()
    assert [layer for layer in range(16) if PLAN.swaps_layer(layer)] == [0, 1, 2, 5]
    assert [layer for layer in range(16) if PLAN.recomputes_layer(layer)] == [0, 1, 2, 5]
    assert PLAN.layers() == (0, 1, 2, 3, 4, 5)


def test_the_least_that_the_host_must_hold() -> None:
    """The minimum is the swapped sites of known size, without the last two layers."""
    assert PLAN.least_host_bytes() == 4 * 688 * MIB
    sites = {"mlp/0": SitePlan("swap", 1.0), "mlp/1": SitePlan("swap"), "fc/0": SitePlan("keep", 9.0)}
    last = PlanClass("12-15", sites)
    assert replace(PLAN, classes=(last,)).least_host_bytes() == 2 * MIB


def edit(*path: str | int, to: Any) -> Any:
    def change(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        if to is ...:
            del value[path[-1]]
        else:
            value[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("format", to="a profile"), 'format is "a profile", allowed is "megatron-swap plan"'),
        (edit("version", to=2), "version is 2, allowed is 1"),
        (edit("model", to=...), "the key 'model' is missing; needed are model, budget_gib"),
        (edit("clases", to=[]), "the key 'clases' is unknown; allowed are model, budget_gib"),
        (edit("model", "num_layers", to="16"), 'model: num_layers: "16" is given; it must be a whole number'),
        (edit("model", "gated", to=1), "model: gated: 1 is given; it must be true or false"),
        (edit("budget_gib", to=float("inf")), r"budget_gib: Infinity is given; it must be a number from 0 to 1e\+12"),
        (edit("prefetch_gib", to=0), "prefetch_gib: 0 is given; it must be above 0 and finite"),
        (edit("classes", to={}), "classes: {} is given; it must be a list"),
        (edit("classes", 0, "sites", "mlp/0", "action", to="offload"),
         r"classes\[0\]: sites: mlp/0: action: \"offload\" is given; allowed are keep, swap, recompute"),
        (edit("classes", 0, "sites", "mlp", to={"action": "keep"}), r"classes\[0\]: sites: 'mlp' is not a site"),
        (edit("classes", 0, "layers", to="0-16"), "the model has 16 layers, allowed are 0 to 15"),
        (edit("classes", 0, "layers", to="4"), "layer 4 is in '4' and in '3-4'; each layer may be in one class"),
    ],
)  # fmt: skip
def test_errors_name_the_file_and_the_key(tmp_path: Path, change: Any, message: str) -> None:
    path = written(tmp_path, change)
    with pytest.raises(UsageError, match=message) as refusal:
        load_plan(path)
    assert str(refusal.value).startswith(f"{path}: ")


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(UsageError, match="cannot be read"):
        load_plan(path)
    path.write_text("layers: 3")
    with pytest.raises(UsageError, match="is not JSON"):
        load_plan(path)
    path.write_text("[]")
    with pytest.raises(UsageError, match="holds a list, not an object"):
        load_plan(path)


def test_a_plan_for_another_model_is_refused_with_every_difference() -> None:
    check_model(PLAN, replace(MODEL))
    with pytest.raises(UsageError) as refusal:
        check_model(PLAN, replace(MODEL, num_layers=32, sequence_parallel=True, num_experts=8), "plan.json")
    assert str(refusal.value) == (
        "plan.json was made for another model: num_layers is 16 there, 32 here; num_experts is not set there, 8 here; "
        "sequence_parallel is off there, on here. Make a new plan for this one."
    )

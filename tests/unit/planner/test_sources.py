"""Tensors that nobody saves and operators are recomputed from: in the simulator and in the solver."""

from __future__ import annotations

import itertools

import pytest

from megatron.swap.common.plan import Plan, PlanClass, SitePlan
from megatron.swap.common.types import Action
from megatron.swap.planner.assignment import layer_script
from megatron.swap.planner.profile import LayerClass, Profile, Section
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import smallest_budget, solve
from tests.unit.planner.cases import profile, site

INPUT, SOURCE = "checkpoint/0", "source/3"
PART = Section("behind norm/0", ("norm/0",), (SOURCE,), 0.2)


def entry(layers: tuple[int, ...]) -> LayerClass:
    """Layers that save 40 MiB. A norm's 20 are made again from 10 that nobody saves, all of it from an input of 5."""
    sites = (
        site("norm/0", 20, 0.2, 2.0, 3.0),
        site(SOURCE, 10, 0.2, 2.0, 3.0),
        site("mlp/0", 20, 0.8, 1.0, 1.5),
        site(INPUT, 5, 0.0, 0.0, 3.0),
    )  # fmt: skip
    return LayerClass(layers, 1.0, 3.0, sites, (PART, Section("layer", ("norm/0", "mlp/0"), (INPUT,), 1.0)))


WAYS: dict[str, tuple[dict[str, SitePlan], tuple[str, ...]]] = {
    "keep": ({}, ()),
    "swap": ({"norm/0": SitePlan("swap"), "mlp/0": SitePlan("swap")}, ()),
    "part": ({"norm/0": SitePlan("recompute")}, ()),
    "send": ({"norm/0": SitePlan("recompute"), SOURCE: SitePlan("swap"), "mlp/0": SitePlan("swap")}, ()),
    "whole": ({}, ("layer",)),
}


def planned(of: Profile, ways: tuple[str, ...]) -> Plan:
    classes = [PlanClass(str(layer), *WAYS[way]) for layer, way in enumerate(ways)]
    return Plan(of.model, None, None, None, tuple(classes))


def test_a_source_is_held_only_where_it_is_read() -> None:
    def saves(way: str) -> list[tuple[float, Action]]:
        sites, sections = WAYS[way]
        actions = {name: Action[one.action.upper()] for name, one in sites.items()}
        return [(mib, action) for _, mib, action in layer_script(entry((0,)), actions, sections).saves]

    assert entry((0,)).saved_mib == 40
    assert saves("keep") == [(20, Action.KEEP), (20, Action.KEEP)]
    assert saves("part") == [(20, Action.RECOMPUTE), (10, Action.KEEP), (20, Action.KEEP)]
    assert saves("send") == [(20, Action.RECOMPUTE), (10, Action.SWAP), (20, Action.SWAP)]
    assert saves("whole") == [(20, Action.RECOMPUTE), (20, Action.RECOMPUTE), (5, Action.KEEP)]


@pytest.mark.parametrize(("gb_s", "room"), [(5.0, 0.1), (5.0, 0.8), (40.0, 0.1)])
def test_the_solver_finds_what_all_plans_offer(gb_s: float, room: float) -> None:
    of = profile([entry(tuple(range(5)))], gb_s=gb_s)
    least, most = smallest_budget(of), simulate(of, planned(of, ("keep",) * 5)).peak_gib
    budget_gib = least + room * (most - least)
    simulated = [simulate(of, planned(of, ways)) for ways in itertools.product(WAYS, repeat=5)]
    fastest = min(one.step_ms for one in simulated if one.peak_gib <= budget_gib)
    found = solve(of, budget_gib)
    assert found.prediction.peak_gib <= budget_gib
    assert found.lower_bound_ms <= fastest + 1e-6
    assert found.prediction.step_ms <= 1.03 * fastest
    for named in found.plan.classes:
        assert (INPUT in named.sites) == ("layer" in named.sections)
        reads = named.sites["norm/0"].action == "recompute" and "layer" not in named.sections
        assert (SOURCE in named.sites) == reads

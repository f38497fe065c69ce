"""The site log: each storage counts once, and differences from a plan are reported."""

from dataclasses import replace

import pytest
import torch

from megatron.swap.common.plan import Model, Plan, PlanClass, SitePlan
from megatron.swap.common.types import MIB, Action, Site
from megatron.swap.engine.decision import Decision, Reason
from megatron.swap.reporting.plan_run import Seen, SiteLog, merged, plan_of_run, unlike_plan

MODEL = Model(8, 64, 256, 4, 4, 64, 2, 256, "local", "fp32", gated=False)
KEEP, SWAP, RECOMPUTE = Action.KEEP, Action.SWAP, Action.RECOMPUTE


def storage(num_bytes: int = 64) -> torch.UntypedStorage:
    return torch.zeros(num_bytes, dtype=torch.uint8).untyped_storage()


def plan(*classes: PlanClass) -> Plan:
    return Plan(MODEL, None, None, None, classes)


def test_a_storage_counts_where_it_was_saved_first_while_it_lives() -> None:
    log, held = SiteLog(), storage()
    log.note(Site(0, "norm", 0), held, Decision(SWAP, Reason.POLICY))
    log.note(Site(0, "linear", 0), held, Decision(SWAP, Reason.POLICY))
    log.note(Site(1, "norm", 0), held, Decision(KEEP, Reason.POLICY))
    assert log.sites == {Site(0, "norm", 0): Seen(64, SWAP)}
    del held
    log.note(Site(1, "norm", 0), storage(32), Decision(KEEP, Reason.POLICY))
    assert list(log.sites) == [Site(0, "norm", 0), Site(1, "norm", 0)]


def seen(action: Action = SWAP, mib: float = 2.0, layers: range = range(4), site: str = "mlp") -> dict[Site, Seen]:
    return {Site(layer, site, 0): Seen(int(mib * MIB), action) for layer in layers}


SWAP_MLP = PlanClass("0-3", {"mlp/0": SitePlan("swap", 2.0)})


class TestUnlikePlan:
    def test_the_input_of_a_layer_that_runs_again_is_known_under_its_other_name(self) -> None:
        whole = PlanClass("0-3", {"norm/0": SitePlan("swap", 2.0), "mlp/0": SitePlan("recompute", 8.0)}, ("layer",))
        assert unlike_plan(plan(whole), seen(site="checkpoint"), MIB) == []
        assert unlike_plan(plan(replace(whole, sections=())), seen(site="checkpoint"), MIB) != []

    @pytest.mark.parametrize("mib", [2.0, 2.09, 1.91])
    def test_a_run_that_is_what_was_planned_says_nothing(self, mib: float) -> None:
        assert unlike_plan(plan(SWAP_MLP), seen(mib=mib), MIB) == []

    def test_another_size(self) -> None:
        (line,) = unlike_plan(plan(SWAP_MLP), seen(mib=2.2), MIB)
        assert line.startswith("layers 0-3: of another size than planned")
        assert line.endswith(": mlp/0 (2.20 MiB, planned 2.00 MiB)")

    def test_sites_at_which_nothing_was_saved(self) -> None:
        ghost = PlanClass("0-3", {**SWAP_MLP.sites, "mlp/1": SitePlan("swap"), "norm/0": SitePlan("recompute"),
                                  "far/0": SitePlan("keep")})  # fmt: skip
        lines = unlike_plan(plan(ghost, PlanClass("4-7", {"mlp/0": SitePlan("swap")})), seen(), MIB)
        assert lines == ["layers 0-3: planned, but nothing was saved there: mlp/1, norm/0"]

    def test_sites_that_the_plan_does_not_know(self) -> None:
        more = {**seen(), **seen(KEEP, 3.0, range(2), "norm"), **seen(KEEP, 0.9, range(2), "small")}
        lines = unlike_plan(plan(SWAP_MLP), more, MIB)
        assert lines == ["layers 0-1: saved, but not in the plan, so kept: norm/0 (3.00 MiB)"]


class TestPlanOfRun:
    def test_equal_layers_are_one_class_and_sites_keep_their_order(self) -> None:
        log = {**seen(), **seen(RECOMPUTE, 1.0, range(4), "attention"), **seen(KEEP, 2.0, range(4, 6))}
        made = plan_of_run(MODEL, log, None)
        assert made == plan(
            PlanClass("0-3", {"mlp/0": SitePlan("swap", 2.0), "attention/0": SitePlan("recompute", 1.0)}),
            PlanClass("4-5", {"mlp/0": SitePlan("keep", 2.0)}),
        )
        assert unlike_plan(made, log, 0) == []

    def test_layers_that_ran_again_still_do(self) -> None:
        given = plan(PlanClass("0-1", {"checkpoint/0": SitePlan("swap")}, ("layer",)), PlanClass("3", {}, ("layer",)))
        made = plan_of_run(MODEL, seen(SWAP, 1.0, range(2), "checkpoint"), given)
        assert [(entry.layers, entry.sections) for entry in made.classes] == [("0-1", ("layer",)), ("3", ("layer",))]

    def test_ranks_are_one_log_with_the_largest_sizes(self) -> None:
        first, second = seen(SWAP, 1.0, range(2)), seen(SWAP, 3.0, range(1, 4))
        together = merged([first, second])
        assert together == {**seen(SWAP, 1.0, range(1)), **seen(SWAP, 3.0, range(1, 4))}
        assert plan_of_run(replace(MODEL), together, None).layers() == (0, 1, 2, 3)

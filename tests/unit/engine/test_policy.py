"""The choice of storages to swap: layers, patterns of modules, sizes."""

from __future__ import annotations

import pytest

from megatron.swap.common.plan import Model, Plan, PlanClass, SitePlan
from megatron.swap.common.types import Action, Site
from megatron.swap.engine.policy import ManualPolicy, PlanPolicy, matches


@pytest.mark.parametrize(
    ("pattern", "path", "answer"),
    [
        ("mlp", "mlp", True),
        ("mlp", "mlp.linear_fc1", True),
        ("mlp.linear_fc1", "mlp.linear_fc1", True),
        ("mlp.linear_fc1", "mlp", False),
        ("linear_fc1", "mlp.linear_fc1", True),
        ("core_attention", "self_attention.core_attention", True),
        ("core_attention", "self_attention.core_attention.softmax", True),
        ("fc1", "mlp.linear_fc1", False),
        ("mlp.linear", "mlp.linear_fc1", False),
        ("mlp.linear_fc1", "mlp.experts.linear_fc1", False),
        ("experts.local_experts", "mlp.experts.local_experts.0", True),
        ("layer", "layer", True),
        ("mlp", "layer", False),
    ],
)
def test_a_pattern_names_whole_parts_of_a_path(pattern: str, path: str, answer: bool):
    assert matches(pattern, path) is answer


class TestManualPolicy:
    def test_swaps_what_is_chosen_and_large_enough(self):
        policy = ManualPolicy({1, 3}, (), min_bytes=100)
        assert policy.action(Site(1, "mlp", 0), 100) is Action.SWAP
        assert policy.action(Site(1, "mlp", 0), 99) is Action.KEEP
        assert policy.action(Site(2, "mlp", 0), 100) is Action.KEEP
        assert [policy.swaps_layer(layer) for layer in range(5)] == [False, True, False, True, False]

    def test_modules_narrow_the_choice_each_time_it_is_asked(self):
        policy = ManualPolicy({0}, ("mlp", "core_attention"), min_bytes=0)
        for _ in range(2):  # the second answer comes from memory
            assert policy.action(Site(0, "mlp.linear_fc1", 0), 1) is Action.SWAP
            assert policy.action(Site(0, "self_attention.core_attention", 2), 1) is Action.SWAP
            assert policy.action(Site(0, "layer", 0), 1) is Action.KEEP
            assert policy.action(Site(0, "self_attention", 0), 1) is Action.KEEP

    def test_no_layers_swap_nothing(self):
        policy = ManualPolicy((), (), min_bytes=0)
        assert policy.action(Site(0, "mlp", 0), 1 << 30) is Action.KEEP
        assert not policy.swaps_layer(0)

    def test_recomputes_what_is_known_to_be_made_by_the_kinds_asked_for_in_all_layers(self):
        policy = ManualPolicy({0}, ("mlp",), min_bytes=10, recompute=("norm",))
        assert policy.recomputes_layer(5)
        assert policy.action(Site(5, "attention", 0), 10, "norm") is Action.RECOMPUTE
        assert policy.action(Site(5, "attention", 0), 9, "norm") is Action.KEEP
        assert policy.action(Site(5, "attention", 0), 10, "activation") is Action.KEEP
        assert policy.action(Site(0, "mlp", 0), 10) is Action.SWAP
        assert not ManualPolicy({0}, (), min_bytes=0).recomputes_layer(0)

    def test_what_cannot_be_recomputed_is_swapped_where_the_layer_swaps(self):
        class Everything(ManualPolicy):
            def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
                return Action.RECOMPUTE if site.ordinal else Action.KEEP

        policy = Everything({0}, (), min_bytes=0)
        assert policy.action_without_recompute(Site(0, "mlp", 1), 1) is Action.SWAP
        assert policy.action_without_recompute(Site(1, "mlp", 1), 1) is Action.KEEP
        assert policy.action_without_recompute(Site(0, "mlp", 0), 1) is Action.KEEP


class TestPlanPolicy:
    policy = PlanPolicy(
        Plan(
            Model(8, 64, 256, 4, 4, 64, 2, 256, "local", "fp32", gated=False), None, None, None,
            (
                PlanClass(
                    "0-1", {"mlp/0": SitePlan("swap"), "norm/0": SitePlan("recompute"), "fc/0": SitePlan("keep")}
                ),
                PlanClass("2", {"norm/0": SitePlan("recompute")}),
                PlanClass("3", {"checkpoint/0": SitePlan("swap")}, ("layer",)),
            ),
        )
    )  # fmt: skip

    def test_answers_for_the_sites_that_are_named_and_keeps_the_rest(self):
        told = {site: self.policy.action(site, 1) for site in (
            Site(1, "mlp", 0), Site(1, "norm", 0), Site(1, "fc", 0), Site(1, "mlp", 1), Site(4, "mlp", 0),
            Site(9, "mlp", 0),
        )}  # fmt: skip
        assert list(told.values()) == [Action.SWAP, Action.RECOMPUTE, *4 * [Action.KEEP]]

    def test_neither_sizes_nor_producers_change_the_answer(self):
        assert self.policy.action(Site(0, "mlp", 0), 0, "norm") is Action.SWAP
        assert self.policy.action(Site(0, "fc", 0), 1 << 30, "norm") is Action.KEEP
        assert self.policy.action(Site(0, "norm", 0), 0, None) is Action.RECOMPUTE

    def test_what_is_asked_of_layers(self):
        assert [layer for layer in range(9) if self.policy.swaps_layer(layer)] == [0, 1, 3]
        assert [layer for layer in range(9) if self.policy.recomputes_layer(layer)] == [0, 1, 2]
        assert [layer for layer in range(9) if self.policy.recomputes_whole(layer)] == [3]

    def test_the_input_of_a_layer_that_runs_again_is_swapped_where_it_swaps_under_any_name(self):
        entry = PlanClass("0", {"norm/0": SitePlan("swap"), "mlp/0": SitePlan("recompute")}, ("layer",))
        kept = PlanClass("1", {"norm/0": SitePlan("keep"), "mlp/0": SitePlan("recompute")}, ("layer",))
        model = Model(8, 64, 256, 4, 4, 64, 2, 256, "local", "fp32", gated=False)
        policy = PlanPolicy(Plan(model, None, None, None, (entry, kept)))
        assert policy.action(Site(0, "checkpoint", 0), 1) is Action.SWAP
        assert policy.action(Site(1, "checkpoint", 0), 1) is Action.KEEP
        assert self.policy.action(Site(3, "checkpoint", 0), 1) is Action.SWAP
        assert self.policy.action(Site(0, "checkpoint", 0), 1) is Action.KEEP  # it does not run again

    def test_what_cannot_be_recomputed_is_swapped_where_the_layer_swaps(self):
        assert self.policy.action_without_recompute(Site(0, "norm", 0), 1) is Action.SWAP
        assert self.policy.action_without_recompute(Site(2, "norm", 0), 1) is Action.KEEP

"""The choice of storages to swap: layers, patterns of modules, sizes."""

import pytest

from megatron.swap.common.plan import Model, Plan, PlanClass, SitePlan
from megatron.swap.common.types import Action, Site
from megatron.swap.engine.policy import ManualPolicy, PlanPolicy, matches

KEEP, SWAP, RECOMPUTE = Action.KEEP, Action.SWAP, Action.RECOMPUTE
CORE_ATTENTION = "self_attention.core_attention"


@pytest.mark.parametrize(("pattern", "path", "answer"), [
    ("mlp", "mlp", True), ("mlp", "mlp.linear_fc1", True), ("mlp.linear_fc1", "mlp.linear_fc1", True),
    ("mlp.linear_fc1", "mlp", False), ("linear_fc1", "mlp.linear_fc1", True), ("fc1", "mlp.linear_fc1", False),
    ("core_attention", CORE_ATTENTION, True), ("core_attention", f"{CORE_ATTENTION}.softmax", True),
    ("mlp.linear", "mlp.linear_fc1", False), ("mlp.linear_fc1", "mlp.experts.linear_fc1", False),
    ("experts.local_experts", "mlp.experts.local_experts.0", True), ("layer", "layer", True), ("mlp", "layer", False),
])  # fmt: skip
def test_a_pattern_names_whole_parts_of_a_path(pattern: str, path: str, answer: bool) -> None:
    assert matches(pattern, path) is answer


def manual(*layers: int, modules: tuple[str, ...] = (), recompute: tuple[str, ...] = ()) -> ManualPolicy:
    return ManualPolicy(layers, modules, 100, recompute)


@pytest.mark.parametrize(("policy", "site", "num_bytes", "producer", "action"), [
    (manual(1, 3), "1/mlp", 100, None, SWAP),
    (manual(1, 3), "1/mlp", 99, None, KEEP),
    (manual(1, 3), "2/mlp", 100, None, KEEP),
    (manual(), "0/mlp", 1 << 30, None, KEEP),
    (manual(0, modules=("mlp", "core_attention")), "0/mlp.linear_fc1", 100, None, SWAP),
    (manual(0, modules=("mlp", "core_attention")), f"0/{CORE_ATTENTION}", 100, None, SWAP),
    (manual(0, modules=("mlp", "core_attention")), "0/layer", 100, None, KEEP),
    (manual(0, modules=("mlp", "core_attention")), "0/self_attention", 100, None, KEEP),
    # What is made by the kinds asked for is recomputed in all layers.
    (manual(0, modules=("mlp",), recompute=("norm",)), "5/attention", 100, "norm", RECOMPUTE),
    (manual(0, modules=("mlp",), recompute=("norm",)), "5/attention", 99, "norm", KEEP),
    (manual(0, modules=("mlp",), recompute=("norm",)), "5/attention", 100, "activation", KEEP),
    (manual(0, modules=("mlp",), recompute=("norm",)), "0/mlp", 100, None, SWAP),
])  # fmt: skip
def test_a_manual_policy(policy: ManualPolicy, site: str, num_bytes: int, producer: str | None, action: Action) -> None:
    layer, path = site.split("/")
    for _ in range(2):  # the second answer comes from memory
        assert policy.action(Site(int(layer), path, 0), num_bytes, producer) is action


def test_what_cannot_be_recomputed_is_swapped_where_the_layer_swaps() -> None:
    class Everything(ManualPolicy):
        def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
            return RECOMPUTE if site.ordinal else KEEP

    policy = Everything({0}, (), min_bytes=0)
    sites = Site(0, "mlp", 1), Site(1, "mlp", 1), Site(0, "mlp", 0)
    assert [policy.action_without_recompute(site, 1) for site in sites] == [SWAP, KEEP, KEEP]
    assert PLANNED.action_without_recompute(Site(0, "norm", 0), 1) is SWAP
    assert PLANNED.action_without_recompute(Site(2, "norm", 0), 1) is KEEP


PLANNED = PlanPolicy(Plan(Model(8, 64, 256, 4, 4, 64, 2, 256, "local", "fp32", gated=False), None, None, None, (
    PlanClass("0-1", {"mlp/0": SitePlan("swap"), "norm/0": SitePlan("recompute"), "fc/0": SitePlan("keep")}),
    PlanClass("2", {"norm/0": SitePlan("recompute")}),
    PlanClass("3", {"checkpoint/0": SitePlan("swap")}, ("layer",)),
    PlanClass("5", {"norm/0": SitePlan("swap"), "mlp/0": SitePlan("recompute")}, ("layer",)),
    PlanClass("6", {"norm/0": SitePlan("keep"), "mlp/0": SitePlan("recompute")}, ("layer",)),
)))  # fmt: skip


@pytest.mark.parametrize(("layer", "path", "ordinal", "action"), [
    (1, "mlp", 0, SWAP), (1, "norm", 0, RECOMPUTE), (1, "fc", 0, KEEP),
    (1, "mlp", 1, KEEP), (4, "mlp", 0, KEEP), (9, "mlp", 0, KEEP),  # not named
    # The input of a layer that runs again is swapped where it swaps, under any name. Layer 0 does not run again.
    (5, "checkpoint", 0, SWAP), (6, "checkpoint", 0, KEEP), (3, "checkpoint", 0, SWAP), (0, "checkpoint", 0, KEEP),
])  # fmt: skip
def test_a_plan(layer: int, path: str, ordinal: int, action: Action) -> None:
    for num_bytes, producer in ((0, "norm"), (1 << 30, None)):
        assert PLANNED.action(Site(layer, path, ordinal), num_bytes, producer) is action


def test_the_layers_of_a_plan() -> None:
    assert [layer for layer in range(9) if PLANNED.swaps_layer(layer)] == [0, 1, 3, 5]
    assert [layer for layer in range(9) if PLANNED.recomputes_layer(layer)] == [0, 1, 2, 5, 6]
    assert [layer for layer in range(9) if PLANNED.recomputes_whole(layer)] == [3, 5, 6]

"""Policies of a run that plans itself say why they keep a storage."""

from __future__ import annotations

import pytest
import torch

from megatron.swap.autotune.switch import SafePolicy, SwitchingPolicy
from megatron.swap.common.plan import Model, Plan
from megatron.swap.common.types import LayerPosition, Site
from megatron.swap.engine.decider import Decider
from megatron.swap.engine.decision import Reason
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.release_budget import ReleaseBudget

SMALL = torch.empty(99, dtype=torch.uint8).untyped_storage()
PLAN = Plan(Model(8, 64, 256, 4, 4, 64, 2, 256, "local", "fp32", gated=False), None, None, None, ())


def reason_to_keep(policy: Policy) -> Reason:
    decider = Decider(policy, ReleaseBudget(None))
    return decider.decide(Site(0, "mlp", 0), SMALL, LayerPosition(0, 1, ends_in_loss=False)).reason


@pytest.mark.parametrize("policy", [SafePolicy(100, ()), SwitchingPolicy(SafePolicy(100, ()), 100)])
def test_a_small_storage_is_kept_for_its_size(policy: Policy) -> None:
    assert reason_to_keep(policy) is Reason.BELOW_MIN_SIZE


def test_a_plan_keeps_a_storage_whatever_its_size() -> None:
    policy = SwitchingPolicy(SafePolicy(100, ()), 100)
    policy.apply_plan(PLAN)
    assert reason_to_keep(policy) is Reason.POLICY
    policy.apply_plan(None)
    assert reason_to_keep(policy) is Reason.BELOW_MIN_SIZE

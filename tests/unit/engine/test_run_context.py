"""The context of a forward holds again where its layer runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.swap.engine.run_context import SWITCHES, RunContext


def values() -> dict[str, Any]:
    return {switch.name: switch.get() for switch in SWITCHES}


@pytest.mark.parametrize("fails", [False, True])
def test_switches_hold_again_and_come_back_also_after_an_error(fails: bool) -> None:
    outside = values()
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        inside, context = values(), RunContext.now()
    assert {name for name in outside if outside[name] != inside[name]} >= {"flash attention"}
    try:
        with context.restored():
            assert values() == inside
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert values() == outside


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return value[::-1]
    return {torch.float32: torch.float64, "none": "ieee", "tf32": "ieee", (False, False): (True, False)}[value]


@pytest.mark.parametrize("switch", SWITCHES, ids=[switch.name for switch in SWITCHES])
def test_every_switch_can_be_set(switch: Any) -> None:
    before, context = switch.get(), RunContext.now()
    changed = another(before)
    try:
        switch.set(changed)
        with context.restored():
            assert switch.get() == before
        assert switch.get() == changed
    finally:
        switch.set(before)


@pytest.mark.parametrize("caches", [False, True])
def test_autocast_holds_again_and_leaves_no_casts_behind(caches: bool) -> None:
    """Casts of weights that outlive an optimizer's step would be used in the next forward."""
    linear, rows = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=caches):
        context = RunContext.now()
        before = linear(rows)
    with context.restored():
        assert torch.equal(linear(rows), before)
        assert torch.is_autocast_cache_enabled() is caches
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    with torch.no_grad():
        linear.weight.add_(1.0)
    with torch.autocast("cpu", torch.bfloat16):
        after = linear(rows)
        assert not torch.equal(after, before)
        with RunContext(context.values, ((False, torch.float16), (False, torch.float32)), True, None).restored():
            assert linear(rows).dtype is torch.float32

"""The context of a forward holds again where its layer runs again."""

from contextlib import suppress
from typing import Any

import pytest
import torch

from megatron.swap.engine.run_context import SWITCHES, RunContext


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return value[::-1]
    return {torch.float32: torch.float64, "none": "ieee", "tf32": "ieee", (False, False): (True, False)}[value]


@pytest.mark.parametrize("switch", SWITCHES, ids=[switch.name for switch in SWITCHES])
def test_every_switch_holds_again_and_comes_back_also_after_an_error(switch: Any) -> None:
    before, context = switch.get(), RunContext.now()
    changed = another(before)
    try:
        switch.set(changed)
        with suppress(InterruptedError), context.restored():
            assert switch.get() == before
            raise InterruptedError
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


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="PyTorch before 2.9")
def test_where_operations_have_precisions_of_their_own_the_older_switches_are_not_read() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    try:
        RunContext.now()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]

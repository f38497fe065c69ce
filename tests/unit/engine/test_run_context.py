"""The context of a forward holds again where its layer runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.swap.engine.run_context import SWITCHES, RunContext


class Doubles(TorchFunctionMode):
    """Doubles what ``torch.sin`` returns, and must not be entered again."""

    num_entered = 0

    def __enter__(self) -> Any:
        self.num_entered += 1
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.sin else result


class Adds(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + 1 if func is torch.ops.aten.sin.default else result


def result() -> float:
    return torch.sin(torch.zeros(())).item()


def values() -> dict[str, Any]:
    return {switch.name: switch.get() for switch in SWITCHES}


def test_switches() -> None:
    outside = values()
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        inside, context = values(), RunContext.now()
    assert {name for name in outside if outside[name] != inside[name]} >= {"flash attention"}
    with context.restored():
        assert values() == inside
    assert values() == outside


def test_every_switch_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {torch.float32: torch.float64, "none": "ieee", "tf32": "ieee", "ieee": "tf32"}
    for switch in SWITCHES:
        before = switch.get()
        changed = not before if isinstance(before, bool) else other.get(before) if isinstance(before, str) else before
        if changed is None:
            continue
        context = RunContext.now()
        switch.set(changed)
        with context.restored():
            assert switch.get() == before, switch.name
        assert switch.get() == changed, switch.name
        switch.set(before)


def test_modes_are_pushed_but_not_entered() -> None:
    function_mode, dispatch_mode = Doubles(), Adds()
    with dispatch_mode, function_mode:
        assert result() == 2.0
        context = RunContext.now()
    assert result() == 0.0
    with context.restored():
        assert result() == 2.0
    assert result() == 0.0
    assert function_mode.num_entered == 1


def test_modes_of_the_backward_do_not_count() -> None:
    context = RunContext.now()
    with Adds(), Doubles():
        with context.restored():
            assert result() == 0.0
        assert result() == 2.0


def test_modes_of_this_package_stay() -> None:
    ours = type("Ours", (Adds,), {"__module__": "megatron.swap.nn.test"})()
    context = RunContext.now()
    with ours, context.restored():
        assert result() == 1.0
    with Doubles():
        context = RunContext.now()
    with ours, context.restored():
        assert result() == 2.0


def test_modes_come_back_after_an_error() -> None:
    with Doubles():
        context = RunContext.now()
    with Adds():
        with pytest.raises(ValueError, match="within"), context.restored():
            raise ValueError("within")
        assert result() == 1.0
    assert result() == 0.0


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
        with RunContext(context.values, ((False, torch.float16), (False, torch.float32)), True, (), ()).restored():
            assert linear(rows).dtype is torch.float32

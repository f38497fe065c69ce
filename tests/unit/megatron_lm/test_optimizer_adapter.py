"""A Megatron optimizer is adapted as a whole, and restored completely."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import nn

from megatron.swap.common.types import KIB, MIB, UsageError
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.megatron_lm.optimizer_swap import OffloadSettings, OptimizerSwap
from tests.precise_adam import FusedAdam


def megatrons_optimizer() -> Any:
    """Return Megatron's optimizer for single precision with Adam and three parameters."""
    numbers = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(KIB, generator=numbers)) for _ in range(3)]
    optimizer = FP32Optimizer.__new__(FP32Optimizer)
    vars(optimizer).update(
        optimizer=torch.optim.Adam(params), init_state_fn=None, config=None, is_stub_optimizer=False, grad_scaler=None
    )
    return optimizer


def params_of(optimizer: Any) -> list[nn.Parameter]:
    return [param for group in optimizer.optimizer.param_groups for param in group["params"]]


def step(optimizer: Any, number: int) -> None:
    """Run one step of the inner optimizer, with gradients that depend on ``number``."""
    for param in params_of(optimizer):
        param.grad = torch.full_like(param, 0.5 + number)
    optimizer.optimizer.step()


def swapped(optimizer: Any) -> OptimizerSwap:
    swap = OptimizerSwap(EmulatedDevice(0.002), OffloadSettings(1.0, 16 * MIB))
    swap.attach(optimizer)
    return swap


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_what_reads_host_memory_stays_while_there_is_state(is_reloaded: bool) -> None:
    """A last checkpoint is saved when training has ended; a step afterwards must get tensors of the device."""
    optimizer = megatrons_optimizer()
    optimizer.optimizer = FusedAdam(params_of(optimizer), exp_avg_dtype=torch.uint8)
    swap = swapped(optimizer)
    step(optimizer, 0)
    if is_reloaded:
        swap.set_offload_fraction(0.0)
    swap.close()
    left = {"get_unscaled_state", "set_scaled_state"} & vars(optimizer.optimizer).keys()
    assert len(left) == (0 if is_reloaded else 2)
    moments = [optimizer.optimizer.get_unscaled_state(param, "exp_avg") for param in params_of(optimizer)]
    assert all(bool(moment.isfinite().all()) and bool(moment.any()) for moment in moments)


@pytest.mark.parametrize("has_own_step", [True, False])
def test_it_is_given_back_as_it_was_and_trains_on(has_own_step: bool) -> None:
    """A method that somebody replaced before is restored too."""
    plain, optimizer = megatrons_optimizer(), megatrons_optimizer()
    if has_own_step:
        optimizer.optimizer.step = optimizer.optimizer.step
    before = [dict(vars(owner)) for owner in (optimizer, optimizer.optimizer)]
    swap = swapped(optimizer)
    (adapted,) = swap._adapted
    for override in adapted.overrides:
        assert override.method in vars(override.owner)
    step(optimizer, 0)
    adapted.stepper.materialize()
    adapted.remove()
    assert [vars(owner) for owner in (optimizer, optimizer.optimizer)] == before
    step(optimizer, 1)
    for number in range(2):
        step(plain, number)
    for ours, theirs in zip(params_of(optimizer), params_of(plain), strict=True):
        assert torch.equal(ours, theirs)
        states = [one.optimizer.state[param] for one, param in ((optimizer, ours), (plain, theirs))]
        assert set(states[0]) == set(states[1])
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    swap.close()


def test_a_method_that_this_megatron_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method may exist under another name. It would read offloaded state, and training would be wrong without an
    error."""
    optimizer = megatrons_optimizer()
    before = [set(vars(owner)) for owner in (optimizer, optimizer.optimizer)]
    for kind in FP32Optimizer.__mro__:
        if "prepare_grads" in vars(kind):
            monkeypatch.delattr(kind, "prepare_grads")
    with pytest.raises(UsageError, match=r"FP32Optimizer\.prepare_grads, which the installed megatron-core lacks"):
        swapped(optimizer)
    assert [set(vars(owner)) for owner in (optimizer, optimizer.optimizer)] == before


def test_after_training_broke_off_state_can_be_saved() -> None:
    """A script that catches the error saves: nothing has waited for copies, and Megatron's methods are its own
    again."""
    optimizer = megatrons_optimizer()
    before = set(vars(optimizer))
    swap = swapped(optimizer)
    step(optimizer, 0)
    swap.abandon()
    assert "prepare_grads" not in vars(optimizer)
    assert "step" not in vars(optimizer.optimizer)
    moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    assert all(torch.equal(moment, torch.full_like(moment, 0.05)) for moment in moments)
    swap.close()
    assert set(vars(optimizer)) == before


def test_a_distributed_optimizer_is_saved_without_copies_of_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    class FusedAdam(torch.optim.Adam):
        """As TransformerEngine's, which copies all state to fp32."""

        def state_dict(self) -> dict[str, Any]:
            pytest.fail("all state was copied")

    monkeypatch.setattr(DistributedOptimizer, "state_dict", lambda self: self.optimizer.state_dict()["param_groups"])
    plain, optimizer = megatrons_optimizer(), DistributedOptimizer.__new__(DistributedOptimizer)
    inner = FusedAdam(params_of(megatrons_optimizer()))
    names = ("shard_fp32_groups", "model_fp32_groups", "shard_fp32_from_float16_groups", "model_float16_groups")
    vars(optimizer).update(
        dict.fromkeys(names, ()), optimizer=inner, is_stub_optimizer=False,
        ddp_config=SimpleNamespace(fp8_param_gather=False),
    )  # fmt: skip
    swap = swapped(optimizer)
    step(optimizer, 0)
    step(plain, 0)
    assert optimizer.state_dict() == plain.optimizer.state_dict()["param_groups"]
    assert "state_dict" not in vars(inner)
    swap.close()

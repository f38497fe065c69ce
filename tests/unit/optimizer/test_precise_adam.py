"""Lean optimizer state, of the types that TransformerEngine's Adam keeps in bf16 and fp32: equal to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.swap.common.types import KIB, MIB, UsageError
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.megatron_lm import optimizer_adapter
from megatron.swap.megatron_lm.optimizer_adapter import check_types, is_elementwise, tables_of
from megatron.swap.memory.host_arena import HostArena
from megatron.swap.optimizer.param_state import ParamState
from megatron.swap.optimizer.partial_step import PartialStep
from megatron.swap.optimizer.state_memory import StateMemory
from megatron.swap.optimizer.stepper import OptimizerStepper, StepOptions
from megatron.swap.optimizer.transfers import StateTransfers
from tests.precise_adam import FusedAdam

SHAPES = [(40, 50), (7,), (128, 129), (3, 5)]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MAINS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "Megatron's in fp32": (FP32, {}),  # with 8 bits, except by delayed scaling
    "remainders": (BF16, {"master_weights": True, "store_param_remainders": True}),
    "Adam's in fp32": (BF16, {"master_weights": True}),
}


def train(adam: dict[str, Any], dtype: torch.dtype, *, swapped: bool, num_steps: int = 4) -> list[torch.Tensor]:
    """Return parameters, state and scales after some steps; all state is offloaded if ``swapped``."""
    numbers = torch.Generator().manual_seed(1)
    params = [torch.randn(shape, generator=numbers).to(dtype) for shape in SHAPES]
    optimizer = FusedAdam(params, lr=0.01, weight_decay=0.1, use_decoupled_grad=True, **adam)
    stepper = None
    if swapped:
        memory = StateMemory(HostArena(limit_bytes=MIB, pinned=False, region_bytes=64 * KIB))
        transfers = StateTransfers(EmulatedDevice(0.0005), memory, 4 * KIB)
        make_state = transfers.offload_main_param if dtype is FP32 else ParamState
        options = StepOptions(is_elementwise=True, tables=tables_of(optimizer))
        stepper = OptimizerStepper(optimizer, transfers, {param: make_state(param) for param in params}, options)
    for _ in range(num_steps):
        for param in params:
            param.decoupled_grad = torch.randn(param.shape, generator=numbers).to(dtype)  # type: ignore[attr-defined]
        optimizer.step() if stepper is None else stepper.step()
    if stepper is not None:
        stepper.materialize()
    assert set(optimizer._scales) <= set(params), "entries of slices were left over: they hold device memory"
    state = [optimizer.state[param][name] for param in params for name in sorted(optimizer.state[param])]
    scales = [entry[name] for entry in map(optimizer._scales.get, params) if entry for name in sorted(entry)]
    return [*params, *state, *scales]


def same(adam: dict[str, Any], dtype: torch.dtype) -> bool:
    pairs = zip(train(adam, dtype, swapped=True), train(adam, dtype, swapped=False), strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


@pytest.mark.parametrize("mean", [FP32, BF16])
@pytest.mark.parametrize("square", [FP32, BF16])
@pytest.mark.parametrize("main", MAINS)
def test_every_type_is_equal_to_the_bit(main: str, square: torch.dtype, mean: torch.dtype) -> None:
    dtype, options = MAINS[main]
    assert same({"exp_avg_dtype": mean, "exp_avg_sq_dtype": square, **options}, dtype)


def test_without_its_scales_the_optimizer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartialStep, "lend", lambda *_: None)
    with pytest.raises(KeyError):
        same({"exp_avg_dtype": BF16}, FP32)


def test_what_is_refused() -> None:
    def adam(**options: Any) -> FusedAdam:
        return FusedAdam([torch.zeros(2)], **options)

    with pytest.raises(UsageError, match=r"exp_avg is kept in 8 bits.*Choose bf16 or fp32"):
        check_types(adam(exp_avg_dtype=torch.uint8))
    with pytest.raises(UsageError, match=r"exp_avg_sq is kept in fp16 .* Choose bf16 or fp32"):
        check_types(adam(exp_avg_sq_dtype=FP16))
    with pytest.raises(UsageError, match="master_param is kept in fp16"):
        check_types(adam(master_weights=True, master_weight_dtype=FP16))
    check_types(adam(exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16))
    check_types(adam(master_weight_dtype=FP16))  # it keeps no main values
    plain = torch.optim.Adam([torch.zeros(2)])
    check_types(plain)
    assert tables_of(plain) == []
    assert is_elementwise(adam(), has_disk=True)
    assert optimizer_adapter.SCALES in vars(adam())

"""Lean optimizer state, of every type that TransformerEngine's Adam keeps in 16 or 32 bits: equal to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.swap.common.types import KIB, MIB, UsageError
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.megatron_lm import optimizer_adapter
from megatron.swap.megatron_lm.optimizer_adapter import has_scale_per_param, is_elementwise, tables_of
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
    "Adam's in fp16": (BF16, {"master_weights": True, "master_weight_dtype": FP16}),
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
        may_slice = not has_scale_per_param(optimizer, has_disk=False)
        make_state = transfers.offload_main_param if dtype is FP32 else ParamState
        options = StepOptions(may_slice, tables=tables_of(optimizer), may_probe=True)
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


@pytest.mark.parametrize("mean", [FP32, BF16, FP16])
@pytest.mark.parametrize("square", [FP32, BF16, FP16])
@pytest.mark.parametrize("main", MAINS)
def test_every_type_is_equal_to_the_bit(main: str, square: torch.dtype, mean: torch.dtype) -> None:
    dtype, options = MAINS[main]
    assert same({"exp_avg_dtype": mean, "exp_avg_sq_dtype": square, **options}, dtype)


def test_a_scale_for_each_slice_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``has_scale_per_param``, parameters would be stepped in slices."""
    monkeypatch.setattr(f"{__name__}.has_scale_per_param", lambda *_, **__: False)
    assert not same({"exp_avg_dtype": FP16}, FP32)


def test_without_its_scales_the_optimizer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartialStep, "lend", lambda *_: None)
    with pytest.raises(KeyError):
        same({"exp_avg_dtype": BF16}, FP32)


def test_what_is_refused(tmp_path: Path) -> None:
    def adam(**options: Any) -> FusedAdam:
        return FusedAdam([torch.zeros(2)], **options)

    with pytest.raises(UsageError, match=r"exp_avg is kept in 8 bits.*Choose bf16"):
        has_scale_per_param(adam(exp_avg_dtype=torch.uint8), has_disk=False)
    with pytest.raises(UsageError, match=r"exp_avg_sq is kept in fp16 .* Choose fp32 or bf16"):
        has_scale_per_param(adam(exp_avg_sq_dtype=FP16), has_disk=True)
    assert not has_scale_per_param(adam(exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16), has_disk=True)
    assert not has_scale_per_param(adam(master_weight_dtype=FP16), has_disk=True)  # it keeps no main values
    assert has_scale_per_param(adam(master_weights=True, master_weight_dtype=FP16), has_disk=False)
    plain = torch.optim.Adam([torch.zeros(2)])
    assert not has_scale_per_param(plain, has_disk=True)
    assert tables_of(plain) == []
    assert is_elementwise(adam(), has_disk=True)
    assert optimizer_adapter.SCALES in vars(adam())

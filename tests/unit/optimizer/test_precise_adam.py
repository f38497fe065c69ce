"""Lean optimizer state, of the types that TransformerEngine's Adam keeps in bf16 and fp32: equal to the bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron.swap.common.types import KIB, MIB, UsageError
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.megatron_lm.optimizer_adapter import is_elementwise, tables_of
from megatron.swap.megatron_lm.scaled_state import create_missing, scaled_names, types_of
from megatron.swap.memory.host_arena import HostArena
from megatron.swap.optimizer.param_state import ParamState
from megatron.swap.optimizer.state_memory import StateMemory
from megatron.swap.optimizer.stepper import OptimizerStepper, StepOptions
from megatron.swap.optimizer.transfers import StateTransfers
from megatron.swap.optimizer.wrapped import stored
from tests.precise_adam import Float8Tensor, FusedAdam

SHAPES = [(40, 50), (7,), (128, 129), (3, 5)]
FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
MAINS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "Megatron's in fp32": (FP32, {}),  # with 8 bits, except by delayed scaling
    "remainders": (BF16, {"master_weights": True, "store_param_remainders": True}),
    "Adam's in fp32": (BF16, {"master_weights": True}),
    "Adam's in fp16": (BF16, {"master_weights": True, "master_weight_dtype": FP16}),
}


def swapped(params: list[torch.Tensor], adam: dict[str, Any]) -> tuple[FusedAdam, OptimizerStepper]:
    """Return an optimizer, and the stepper that offloads its state."""
    optimizer = FusedAdam(params, lr=0.01, weight_decay=0.1, use_decoupled_grad=True, **adam)
    memory = StateMemory(HostArena(limit_bytes=MIB, pinned=False, region_bytes=64 * KIB))
    transfers = StateTransfers(EmulatedDevice(0.0005), memory, 4 * KIB)
    make_state = transfers.offload_main_param if params[0].dtype is FP32 else ParamState
    has_scales = bool(scaled_names(optimizer))
    assert is_elementwise(optimizer, has_disk=False) != has_scales
    scaled_types = partial(types_of, optimizer) if has_scales else None
    options = StepOptions(not has_scales, tables=tables_of(optimizer), scaled_types=scaled_types)
    states = {param: make_state(param) for param in params}
    return optimizer, OptimizerStepper(optimizer, transfers, states, options)


class Training:
    """Steps on random gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._numbers = torch.Generator().manual_seed(1)
        self.params = [torch.randn(shape, generator=self._numbers).to(dtype) for shape in SHAPES]

    def step(self, step: Callable[[], None], num_steps: int = 1) -> None:
        for _ in range(num_steps):
            for param in self.params:
                gradient = torch.randn(param.shape, generator=self._numbers).to(param.dtype)
                param.decoupled_grad = gradient  # type: ignore[attr-defined]
            step()

    def values(self, optimizer: FusedAdam) -> list[torch.Tensor]:
        """Return parameters, state and scales."""
        entries = [optimizer.state[param] for param in self.params]
        assert set(optimizer._scales) <= set(self.params), "entries of slices were left over: they hold device memory"
        scales = [entry[name] for entry in map(optimizer._scales.get, self.params) if entry for name in sorted(entry)]
        return [*self.params, *(stored(entry[name]) for entry in entries for name in sorted(entry)), *scales]


def train(adam: dict[str, Any], dtype: torch.dtype, *, is_swapped: bool) -> list[torch.Tensor]:
    """Return parameters, state and scales after four steps."""
    training = Training(dtype)
    if not is_swapped:
        optimizer = FusedAdam(training.params, lr=0.01, weight_decay=0.1, use_decoupled_grad=True, **adam)
        training.step(optimizer.step, 4)
        return training.values(optimizer)
    optimizer, stepper = swapped(training.params, adam)
    training.step(stepper.step, 4)
    stepper.materialize()
    return training.values(optimizer)


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def same(adam: dict[str, Any], dtype: torch.dtype) -> bool:
    plain = train(adam, dtype, is_swapped=False)
    return are_equal(train(adam, dtype, is_swapped=True), plain)


@pytest.mark.parametrize("main", MAINS)
def test_every_type_is_equal_to_the_bit(main: str) -> None:
    dtype, options = MAINS[main]
    for mean, square in ((FP32, BF16), (BF16, FP16), (FP16, FP8), (FP8, FP8)):
        assert same({"exp_avg_dtype": mean, "exp_avg_sq_dtype": square, **options}, dtype), (mean, square)


def test_state_with_scales_is_stepped_whole_and_not_on_disk() -> None:
    def adam(**options: Any) -> FusedAdam:
        return FusedAdam([torch.zeros(2)], **options)

    for options in ({"exp_avg_dtype": torch.uint8}, {"exp_avg_sq_dtype": FP16}):
        assert not is_elementwise(adam(**options), has_disk=False)
        with pytest.raises(UsageError, match=r"--swap-disk-dir: exp_avg.* choose bf16 or fp32"):
            is_elementwise(adam(**options), has_disk=True)
    assert not is_elementwise(adam(master_weights=True, master_weight_dtype=FP16), has_disk=False)
    muon = type("OrthogonalizedOptimizer", (torch.optim.Adafactor,), {})([torch.zeros(4)])  # steps whole parameters
    with pytest.raises(UsageError, match=r"--swap-disk-dir: .* steps whole parameters, .* one of Adam, AdamW"):
        is_elementwise(muon, has_disk=True)
    assert not is_elementwise(muon, has_disk=False)
    for options in ({"exp_avg_dtype": BF16}, {"master_weight_dtype": FP16}):  # the last keeps no main values
        assert is_elementwise(adam(**options), has_disk=True)


LEAN = {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8, "master_weights": True, "store_param_remainders": True}


def test_of_moments_in_8_bits_nothing_stays_on_the_device() -> None:
    training = Training(BF16)
    optimizer, stepper = swapped(training.params, LEAN)
    for _ in range(2):  # the first step creates them
        training.step(stepper.step)
        stepper._transfers.release_offloaded()
        for param in training.params:
            for name in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[param][name]
                assert isinstance(moment, Float8Tensor)
                assert moment._data.shape == param.shape
                assert moment._data.untyped_storage().nbytes() == 1
                assert moment._transpose is None
                assert not moment._quantizer.has_columns
    assert stepper.state.offloaded_bytes == 4 * sum(param.numel() for param in training.params)


@pytest.mark.parametrize("is_kept_first", [False, True])
def test_state_in_8_bits_may_be_kept_and_offloaded_again(is_kept_first: bool) -> None:
    training = Training(BF16)
    optimizer, stepper = swapped(training.params, LEAN)
    everything = set(training.params)
    for offloaded in (set() if is_kept_first else everything, set(training.params[:1]), set(), everything):
        stepper.set_offloaded(offloaded)
        training.step(stepper.step)
    assert isinstance(optimizer.state[training.params[1]]["exp_avg"], Float8Tensor)
    stepper.materialize()
    assert are_equal(training.values(optimizer), train(LEAN, BF16, is_swapped=False))


@pytest.mark.parametrize("moment", [FP8, FP16])
def test_a_step_that_fails_leaves_values_their_scales(moment: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first parameter, alone in its bucket, is stepped. The step fails while it stores the second one's state."""
    training = Training(BF16)
    optimizer, stepper = swapped(training.params, {**LEAN, "exp_avg_dtype": moment})
    training.step(stepper.step)
    stepper.materialize()
    before = [optimizer.get_unscaled_state(param, "exp_avg").clone() for param in training.params]
    store, stored_names = FusedAdam.store, []

    def fail(optimizer: FusedAdam, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        stored_names.append(name)
        store(optimizer, param, name, 1e3 * values)
        if len(stored_names) == 5:
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(FusedAdam, "store", fail)
        with pytest.raises(ZeroDivisionError):
            training.step(stepper.step)
    for param in training.params:
        assert stored(optimizer.state[param]["exp_avg"]).untyped_storage().nbytes() <= 4
    stepper.materialize()
    after = [optimizer.get_unscaled_state(param, "exp_avg") for param in training.params]
    assert list(map(torch.equal, before, after)) == [False, True, True, True]


@pytest.mark.parametrize("writes", [False, True])
def test_a_checkpoint_reads_and_writes_state_with_scales_on_the_device(writes: bool) -> None:
    training = Training(BF16)
    optimizer, stepper = swapped(training.params, LEAN)
    training.step(stepper.step)
    stepper.materialize()
    moment = stored(optimizer.state[training.params[0]]["exp_avg"])
    before, address = moment.clone(), moment.data_ptr()
    with stepper.state.on_device(training.params[0], "exp_avg", writes=writes):
        assert moment.data_ptr() != address
        assert torch.equal(moment, before)
        moment.add_(1)
    assert moment.data_ptr() == address
    assert torch.equal(moment, before + 1 if writes else before)


def test_state_is_created_for_loading_one_parameter_at_a_time() -> None:
    training = Training(BF16)
    optimizer, stepper = swapped(training.params, LEAN)
    assert stepper.state.offloaded_bytes == 4 * sum(param.numel() for param in training.params), "before any step"
    stepper.materialize()
    create_missing(optimizer, stepper.state)
    stepper.materialize_for_load()
    for param in training.params:
        assert stepper.state.is_in_host(param, "exp_avg")
        assert optimizer.state[param]["exp_avg"].float().eq(0).all()
    training.step(stepper.step, 4)
    stepper.materialize_for_load()
    assert are_equal(training.values(optimizer), train(LEAN, BF16, is_swapped=False))

"""Optimizers with offloaded state: equal to the plain optimizer to the bit, and missing waits show."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import FP32Optimizer
from packaging.version import Version
from torch import nn

from megatron.swap.common.types import GIB, KIB, MIB, UsageError
from megatron.swap.devices.cuda import CudaDevice
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.megatron_lm import optimizer_swap
from megatron.swap.megatron_lm.optimizer_swap import OffloadSettings, OptimizerSwap, expected_state
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_arena import HostArena
from megatron.swap.memory.host_memory import HostMemoryError
from megatron.swap.optimizer.param_state import ParamState
from megatron.swap.optimizer.state_memory import StateMemory
from megatron.swap.optimizer.stepper import NUM_BUFFERS, OptimizerStepper, StepOptions
from megatron.swap.optimizer.transfers import StateTransfers
from megatron.swap.planner.profile import BUCKET_BYTES, BUCKETS_GIB
from tests.megatron_args import parsed

SHAPES = ((64, 33), (7,), (1000,), (128, 65))
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class CountsInGroup(torch.optim.Optimizer):
    """An optimizer that counts steps in the group, also in one without parameters, as TransformerEngine's does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("seen", torch.zeros_like(param))
                gradient = param.grad if param.grad is not None else param.decoupled_grad
                state["seen"] += gradient
                param -= group["lr"] * state["seen"] / group["step"]


class LooksUp(torch.optim.Adafactor):
    """An optimizer that steps a parameter by what Megatron has set on it, as Muon does."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad *= param.factor
        super().step()


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adam": lambda params: torch.optim.Adam(
        [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}], lr=0.01, amsgrad=True
    ),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "counts": lambda params: CountsInGroup([{"params": params[:1]}, {"params": []}, {"params": params[1:]}]),
    "whole": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "whole, looks up": lambda params: LooksUp(params, lr=0.01),
}


class Training:
    """A few parameters and their copies in bf16, as Megatron has them. Gradients are made up.

    Args:
        chooses: which parameters' state is offloaded; ``None``: nothing is swapped.
        with_main: so are their own values.
    """

    def __init__(
        self, make: Make, chooses: Callable[[torch.Tensor], bool] | None = None, *, with_main: bool = True,
        is_elementwise: bool = True, bucket_bytes: int = 4 * KIB, limit_bytes: int = MIB, on: str = "cpu",
        disk: DiskFile | None = None,
    ) -> None:  # fmt: skip
        numbers = torch.Generator().manual_seed(1)
        self.params = [torch.randn(shape, generator=numbers).to(on) for shape in SHAPES]
        for i, param in enumerate(self.params):
            vars(param)["factor"] = i - 1.5
        self.model = [param.bfloat16() for param in self.params]
        self.optimizer = make(self.params)
        self.numbers = torch.Generator().manual_seed(2)
        self.device = CudaDevice() if on == "cuda" else EmulatedDevice(0.002)
        self.stepper: OptimizerStepper | None = None
        if chooses is not None:
            self.arena = HostArena(limit_bytes=limit_bytes, pinned=on == "cuda", region_bytes=64 * KIB)
            self.transfers = StateTransfers(self.device, StateMemory(self.arena, disk), bucket_bytes)
            make_state = self.transfers.offload_main_param if with_main else ParamState
            chosen = {param: make_state(param) for param in self.params if chooses(param)}
            options = StepOptions(is_elementwise, self._copy_to_model)
            self.stepper = OptimizerStepper(self.optimizer, self.transfers, chosen, options)

    def _copy_to_model(self, param: torch.Tensor, start: int, stop: int, values: torch.Tensor) -> None:
        number = next(i for i, mine in enumerate(self.params) if mine is param)
        self.model[number].view(-1)[start:stop].copy_(values.view(-1))

    def steps(self, num_steps: int, without_gradient: int | None = None) -> Training:
        for _ in range(num_steps):
            for group in self.optimizer.param_groups:  # a schedule
                group["lr"] *= 0.75
            if self.stepper is not None:
                self.stepper.end_materialize()  # materialized tensors are on the host, where a gradient is not
            for i, param in enumerate(self.params):
                gradient = torch.randn(param.shape, generator=self.numbers).to(self.device.torch_device)
                param.grad = None if i == without_gradient else gradient
            if self.stepper is not None:
                self.stepper.step()
            else:
                self.optimizer.step()
                for model, param in zip(self.model, self.params, strict=True):
                    model.copy_(param)
        return self

    def all(self) -> list[Any]:
        """Return parameters, their copies, state and settings, in a fixed order."""
        if self.stepper is not None:
            self.stepper.materialize()
        state = [self.optimizer.state.get(param, {}) for param in self.params]
        settings = [
            {name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]
        values = [value for entry in state for _, value in sorted(entry.items())]
        return [*self.params, *self.model, *values, sorted(sorted(entry) for entry in state), settings]


def same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a.cpu(), b.cpu()) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize(("name", "with_main", "large_alone", "bucket_bytes"), [
    *((name, True, False, 4 * KIB) for name in OPTIMIZERS),
    *((name, False, True, 4 * KIB) for name in ("adamw", "counts", "whole")), ("adam", True, True, MIB),
])  # fmt: skip
def test_as_the_optimizer_alone(name: str, with_main: bool, large_alone: bool, bucket_bytes: int) -> None:
    make = OPTIMIZERS[name]
    swapped = Training(
        make, lambda param: param.numel() > 999 or not large_alone, with_main=with_main, bucket_bytes=bucket_bytes,
        is_elementwise="whole" not in name,
    )  # fmt: skip
    assert same(swapped.steps(4).all(), Training(make).steps(4).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_the_optimizer_alone_on_a_gpu(name: str) -> None:
    make = OPTIMIZERS[name]
    swapped = Training(make, lambda _: True, is_elementwise="whole" not in name, on="cuda")
    alone = Training(make, on="cuda")
    try:
        for _ in range(3):  # materialized and released in between
            assert same(swapped.steps(3).all(), alone.steps(3).all())
    finally:
        swapped.arena.close()  # memory that is registered and gone is in the way of the next


def test_slices_are_no_longer_than_a_bucket() -> None:
    assert BUCKETS_GIB * GIB == BUCKET_BYTES * NUM_BUFFERS, "the planner knows what buckets take"
    training = Training(OPTIMIZERS["adamw"], lambda _: True).steps(2)
    assert training.stepper is not None
    for param_state in training.stepper.state.param_states:
        sizes = [(shard.stop - shard.start) * param_state.element_bytes for shard in param_state.shards]
        assert param_state.element_bytes == 12
        assert max(sizes) <= 4 * KIB
        assert sum(sizes) == 12 * param_state.param.numel()


@pytest.mark.parametrize(("name", "first"), [(name, first) for first, name in enumerate(OPTIMIZERS)])
def test_what_is_offloaded_may_change_between_steps(name: str, first: int) -> None:
    """It may change before there is state, and after a step in which some parameters had no gradient."""
    swapped = Training(OPTIMIZERS[name], lambda _: True, is_elementwise="whole" not in name)
    alone = Training(OPTIMIZERS[name])
    choices = random.Random(first)
    for number in range(8):
        without = 2 if number == 4 and name != "counts" else None
        if number >= first:
            assert swapped.stepper is not None
            wanted = choices.sample(range(len(SHAPES)), choices.randint(0, len(SHAPES)))
            swapped.stepper.set_offloaded({swapped.params[i] for i in wanted})
            assert len(swapped.stepper.state.param_states) == len(SHAPES)
            assert len(swapped.stepper.state.offloaded) == len(wanted)
            for param in (swapped.params[i] for i in wanted):
                held = [param, *swapped.optimizer.state.get(param, {}).values()]
                assert all(one.untyped_storage().nbytes() == 4 for one in held if one.shape == param.shape)
        swapped.steps(1, without)
        alone.steps(1, without)
    assert same(swapped.all(), alone.all())


def test_what_is_offloaded_reads_as_nan_and_cannot_be_written() -> None:
    training = Training(OPTIMIZERS["adamw"], lambda _: True).steps(1)
    param, state = training.params[0], training.optimizer.state[training.params[0]]
    for tensor in (param, state["exp_avg"]):
        assert tensor.shape == SHAPES[0]
        assert tensor.isnan().all()
        assert tensor.untyped_storage().nbytes() == 4
        with pytest.raises(RuntimeError, match="single memory location"):
            tensor.copy_(torch.zeros(SHAPES[0]))
    assert training.stepper is not None
    training.stepper.materialize()
    assert not param.isnan().any()
    assert float(state["step"]) == 1
    training.stepper.end_materialize()
    assert param.isnan().all()


def test_what_is_loaded_is_offloaded() -> None:
    """``load_state_dict`` replaces state and writes to main parameters."""
    source = Training(OPTIMIZERS["adamw"]).steps(3)
    target = Training(OPTIMIZERS["adamw"], lambda _: True)
    assert target.stepper is not None
    target.stepper.materialize()
    target.optimizer.load_state_dict(source.optimizer.state_dict())
    for mine, theirs in zip(target.params, source.params, strict=True):
        mine.copy_(theirs)
    target.stepper.store_loaded()
    target.numbers.set_state(source.numbers.get_state())
    assert same(target.steps(3).all(), source.steps(3).all())


def test_a_step_that_fails_halfway_keeps_nothing_and_its_state_can_be_saved() -> None:
    training = Training(OPTIMIZERS["adamw"], lambda _: True).steps(2)
    assert training.stepper is not None
    inner, calls = training.stepper._partial_step._step, iter([False, False, False, True])

    def fails_late() -> None:
        inner()
        if next(calls):
            raise torch.OutOfMemoryError("no")

    training.stepper._partial_step._step = fails_late
    with pytest.raises(torch.OutOfMemoryError, match="no"):
        training.steps(1)
    training.transfers.release_offloaded()
    assert (training.transfers.device_bytes, set(training.optimizer.state)) == (0, set(training.params))
    training.stepper.materialize()
    saved = training.optimizer.state_dict()["state"]
    assert all(bool(state["exp_avg"].isfinite().all()) for state in saved.values())


def test_settings_in_tensors_and_state_without_room_are_refused_before_the_first_step() -> None:
    with pytest.raises(UsageError, match="lr in tensors"):
        Training(lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)), lambda _: True)
    num_bytes = 12 * sum(torch.Size(shape).numel() for shape in SHAPES)
    assert num_bytes > 64 * KIB
    with pytest.raises(HostMemoryError, match="--swap-optimizer"):
        Training(OPTIMIZERS["adamw"], lambda _: True, limit_bytes=num_bytes - 4 * KIB)


@pytest.mark.parametrize(("flags", "recipe", "te", "state_bytes"), [
    ((), None, "0", 8), (("bf16",), None, "2.20", 12), (("fp16",), None, "0", 12),
    (("bf16", "use_precision_aware_optimizer"), None, "2.20", 10),
    (("bf16", "use_precision_aware_optimizer"), "delayed", "2.1", 10),
    (("bf16", "use_precision_aware_optimizer"), "blockwise", "2.20", 12),
    (("bf16", "use_precision_aware_optimizer"), None, "2.0", 12),
])  # fmt: skip
def test_before_the_state_is_there_its_size_is_known(
    flags: tuple[str, ...], recipe: str | None, te: str, state_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most nine tenths of host memory are filled, on ranks that share less of the experts' state."""
    monkeypatch.setattr(optimizer_swap, "HostArena", partial(HostArena, region_bytes=MIB))
    monkeypatch.setattr("megatron.core.utils.get_te_version", lambda: Version(te))
    args = parsed(
        "", data_parallel_size=4, context_parallel_size=3, num_distributed_optimizer_instances=3,
        tensor_model_parallel_size=2, expert_model_parallel_size=4, expert_tensor_parallel_size=1,
        use_distributed_optimizer=True, fp8_recipe=recipe, **dict.fromkeys(flags, True),
    )  # fmt: skip
    chunk = nn.ParameterList(torch.empty(MIB, device="meta") for _ in range(100))
    for param in chunk[::2]:
        param.allreduce = False
    frozen = nn.ParameterList(nn.Parameter(torch.empty(MIB, device="meta"), requires_grad=False) for _ in range(100))
    shards = [torch.zeros(MIB // (4 if getattr(param, "allreduce", True) else 2)) for param in chunk]
    num_params = sum(shard.numel() for shard in shards)
    settings = OffloadSettings(1.0, state_bytes * num_params // 2, expected=expected_state(args))
    swap = OptimizerSwap(EmulatedDevice(0.0), settings)
    for part in (chunk[:60], chunk[60:], frozen):  # of a virtual pipeline
        swap.watch(part)
    for shard in shards:
        swap.on_main_param_created(shard)
    assert 0.45 - 0.03 < swap._selection.offloaded_bytes / 4 / num_params <= 0.45
    swap.close()
    args.use_distributed_optimizer = False
    assert expected_state(args)[:2] == (1, 1)  # nobody shares


@pytest.mark.parametrize(("fraction", "with_main"), [(0.1, True), (0.77, False)])
def test_as_much_is_offloaded_as_was_asked_for(fraction: float, with_main: bool) -> None:
    """One large parameter comes first and one last, as those of a vocabulary. No tensor that would fit is left out."""
    params = [torch.zeros(KIB * size) for size in (40, *30 * [4, 1], 40)]
    swap = OptimizerSwap(EmulatedDevice(0.0), OffloadSettings(fraction, 16 * MIB))
    optimizer = FP32Optimizer.__new__(FP32Optimizer)
    optimizer.optimizer = torch.optim.Adam(params)
    for param in params if with_main else ():
        swap.on_main_param_created(param)
    swap.attach(optimizer)
    (adapted,) = swap._adapted
    for wanted in (fraction, fraction / 2):
        swap.set_offload_fraction(wanted)
        sizes = [param.nbytes for param in params]
        offloaded = [param.nbytes for param in adapted.stepper.state.offloaded]
        kept = [size for size in set(sizes) if sizes.count(size) > offloaded.count(size)]
        room_bytes = wanted * sum(sizes) - sum(offloaded)
        assert -1 < room_bytes < min(kept, default=1)
    swap.close()

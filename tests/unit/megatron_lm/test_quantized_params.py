"""Parameters in 8 bits are computed from offloaded main parameters, some at a time: equal to the bit."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.swap.common.types import GIB, KIB, MIB
from megatron.swap.devices.emulated import CopyStream, EmulatedDevice
from megatron.swap.megatron_lm import optimizer_swap, quantized_params
from megatron.swap.megatron_lm.optimizer_swap import OffloadSettings, OptimizerSwap
from megatron.swap.optimizer.overlap import StepOverlap
from megatron.swap.optimizer.transfers import StateTransfers

SIZES = [3000, 50, 4096, 1000]
OF_OTHER_RANKS = 2000
"""Size of a parameter of which this rank has no shard."""


class Cast:
    """A stand-in for Megatron's ``quantize_param_shard``: one scale for a parameter, from its largest value."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        self.batches: list[list[int]] = []

    def __call__(self, models: list[Any], mains: list[Any], offsets: list[Any], group: Any) -> None:
        self.batches.append([model.numel() for model in models])
        for model, main, offset in zip(models, mains, offsets, strict=True):
            assert (main is None) == (offset is None)
            if main is not None:
                assert main.shape == model.shape
                self.values[id(model)] = (main * (127 / main.abs().max())).round().to(torch.int8)


def megatrons_optimizer() -> Any:
    """Return a distributed optimizer of one rank of two. The last of its parameters is in bf16 in the model."""
    numbers = torch.Generator().manual_seed(1)
    mains = [torch.randn(size, generator=numbers) for size in SIZES]
    models = [main.bfloat16() for main in mains]
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    quantized = [*models[:-1], torch.empty(OF_OTHER_RANKS)]
    vars(optimizer).update(
        optimizer=torch.optim.Adam(mains, lr=0.01), is_stub_optimizer=False, data_parallel_group=None,
        ddp_config=SimpleNamespace(fp8_param_gather=True),
        shard_fp32_from_float16_groups=[mains], model_float16_groups=[models],
        shard_fp32_groups=[], model_fp32_groups=[],
        _get_fp8_params_and_shard_fp32_from_fp8=lambda: (quantized, [*mains[:-1], None], [*[0] * 3, None]),
        _get_model_param_range_map=lambda model: {"gbuf_world_in_bucket": SimpleNamespace(start=0, end=model.numel())},
        _expand_quantized_param_shard_for_cast=lambda *entry: tuple([one] for one in entry),
        model_param_gbuf_map=dict.fromkeys(models, (0, None, 0)),
        buffers=[SimpleNamespace(buckets=[SimpleNamespace(param_data=models[-1])])],
    )  # fmt: skip
    return optimizer


def swapped(optimizer: Any, fraction: float) -> OptimizerSwap:
    swap = OptimizerSwap(EmulatedDevice(0.002), OffloadSettings(fraction, 16 * MIB))
    for main in optimizer.shard_fp32_from_float16_groups[0]:
        swap.on_main_param_created(main)
    swap.attach(optimizer)
    return swap


def train(monkeypatch: pytest.MonkeyPatch, fraction: float | None) -> tuple[list[torch.Tensor], Cast]:
    """Return the model's parameters after each of some steps, and the casts."""
    cast, optimizer = Cast(), megatrons_optimizer()
    monkeypatch.setattr(quantized_params, "quantize_param_shard", cast)
    mains, models = optimizer.shard_fp32_from_float16_groups[0], optimizer.model_float16_groups[0]
    swap = None if fraction is None else swapped(optimizer, fraction)
    numbers, found = torch.Generator().manual_seed(2), []
    for step in range(4):
        for main in mains:
            main.grad = torch.randn(main.shape, generator=numbers)
        optimizer.optimizer.step()
        if swap is None:
            quantized, shards, offsets = optimizer._get_fp8_params_and_shard_fp32_from_fp8()
            cast(quantized, shards, offsets, None)
            models[-1].copy_(mains[-1])
        else:
            optimizer._copy_main_params_to_model_params()
            if step == 1:  # as for a checkpoint: main parameters are in host memory until the next step
                (adapted,) = swap._adapted
                adapted.stepper.materialize()
                optimizer._copy_main_params_to_model_params()
        found += [cast.values[id(model)].clone() for model in models[:-1]] + [models[-1].clone()]
    if swap is not None:
        swap.close()
    return found, cast


def same(monkeypatch: pytest.MonkeyPatch, fraction: float = 1.0) -> bool:
    found, plain = train(monkeypatch, fraction)[0], train(monkeypatch, None)[0]
    return all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize(("fraction", "batch_bytes"), [(1.0, 4 * 3500), (0.5, 16 * MIB)])
def test_equal_to_the_bit(fraction: float, batch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_params, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(optimizer_swap, "BUCKET_BYTES", 16 * KIB)  # slices of parameters
    assert same(monkeypatch, fraction)
    batches = train(monkeypatch, fraction)[1].batches
    expected = [[3000, 50], [4096], [2000]] if batch_bytes < MIB else [[*SIZES[:-1], OF_OTHER_RANKS]]
    assert batches[: len(expected)] == expected


def test_values_that_are_still_on_their_way_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every offload is so late that a load which does not wait for it reads older values.

    The device has room, so that offloads are still in flight behind the step.
    """

    def late(stream: CopyStream) -> None:
        time.sleep(0.05 * (stream.direction == "DtoH"))

    monkeypatch.setattr(CopyStream, "delay", late)
    monkeypatch.setattr(StepOverlap, "note_room", lambda _: GIB)
    assert same(monkeypatch)
    monkeypatch.setattr(StateTransfers, "release_offloaded", lambda *_: None)  # the fault
    assert not same(monkeypatch)


def test_an_8_bit_buffer_gets_no_values_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of other parameters would write them there as whole numbers."""
    copied: list[int] = []
    optimizer = megatrons_optimizer()
    on_updated = optimizer_swap.copier_to_model(optimizer)
    for main in optimizer.shard_fp32_from_float16_groups[0]:
        before = optimizer.model_float16_groups[0][-1].clone()
        on_updated(main, 0, main.numel(), main + 1)
        copied.append(not torch.equal(before, optimizer.model_float16_groups[0][-1]))
    assert copied == [False, False, False, True]

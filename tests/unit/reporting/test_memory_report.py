"""The memory report counts every storage, and none twice."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron.swap.common.types import MemoryRow
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.optimizer.param_state import OffloadedTensor
from megatron.swap.reporting.memory_report import measure
from megatron.swap.reporting.summary import RankReport
from tests.unit.optimizer.test_stepper import OPTIMIZERS, Training

STATE_BYTES = 3 * 4
"""Bytes of AdamW for each element: main parameter and two moments."""


def report(**changes: Any) -> RankReport:
    figures: dict[str, Any] = {
        "device_peak_bytes": None, "saved_peak_bytes": 0, "host_booked_bytes": 0, "host_leased_peak_bytes": 0,
        "stayed_bytes": 0, **changes,
    }  # fmt: skip
    return RankReport(steps=[], device="cpu", **figures)


def measured(
    chunks: list[nn.Module], optimizers: list[Any], offloaded: list[OffloadedTensor] | None = None, device: Any = None,
    **reserved: Any
) -> dict[str, MemoryRow]:
    rows = measure(report(**reserved), device or EmulatedDevice(), chunks, optimizers, offloaded or [])
    assert len({row.kind for row in rows}) == len(rows)
    return {row.kind: row for row in rows}


def some_gpu(reserved_bytes: int | None = None, kind: str = "cpu") -> Any:
    return SimpleNamespace(torch_device=torch.device(kind), peak_reserved_bytes=lambda: reserved_bytes)


class Tied(nn.Module):
    """A model whose output layer shares the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.inner = nn.Linear(4, 4)
        self.output = nn.Linear(4, 10, bias=False)
        self.output.weight = self.embedding.weight


WEIGHTS_BYTES = 4 * (10 * 4 + 4 * 4 + 4)


def test_shared_weights_count_once() -> None:
    one, other = Tied(), Tied()
    other.embedding.weight.data = one.embedding.weight.data[:5]  # another parameter, of another shape, on its memory
    other.output.weight = other.embedding.weight
    assert measured([one], [])["weights"] == MemoryRow("weights", WEIGHTS_BYTES)
    assert measured([one, other], [])["weights"].device_bytes == 2 * WEIGHTS_BYTES - 4 * 10 * 4


def test_gradients_in_a_buffer_count_once_and_whole() -> None:
    """Gradients as in Megatron: views of a padded buffer; the optimizer's parameters have views of these."""
    model = Tied()
    buffer = torch.zeros(100)
    offset = 0
    for param in model.parameters():
        param.main_grad = buffer[offset : offset + param.numel()].view(param.shape)
        offset += param.numel()
    mains = [param.detach().clone().requires_grad_() for param in model.parameters()]
    for main, param in zip(mains, model.parameters(), strict=True):
        main.grad = param.main_grad
    optimizer = torch.optim.AdamW(mains)
    assert measured([model], [])["gradients"] == MemoryRow("gradients", 400)
    assert measured([model], [optimizer])["gradients"] == MemoryRow("gradients", 400)
    model.inner.bias.grad = torch.zeros(4)
    mains[0].decoupled_grad = torch.zeros(10, 4, dtype=torch.bfloat16)
    assert measured([model], [optimizer])["gradients"].device_bytes == 400 + 16 + 80


def test_on_a_device_rows_add_up_to_what_the_allocator_held() -> None:
    model = Tied()
    optimizer = torch.optim.SGD([param.detach().clone() for param in model.parameters()], lr=0.1)
    found = measured([model], [optimizer], device=some_gpu(9000), device_peak_bytes=7000, saved_peak_bytes=1)
    assert found["activations"].device_bytes == 7000 - 2 * WEIGHTS_BYTES
    assert found["fragments"] == MemoryRow("fragments", 2000)
    assert sum(row.device_bytes for row in found.values()) == 9000


def rows_of(training: Training, disk: DiskFile | None = None) -> dict[str, MemoryRow]:
    assert training.stepper is not None
    return measured(
        [], [training.optimizer], list(training.stepper.state.offloaded_tensors()),
        optimizer_host_bytes=training.arena.reserved_bytes,
        optimizer_disk_bytes=0 if disk is None else disk.reserved_bytes,
    )  # fmt: skip


def counters_bytes(training: Training) -> int:
    """AdamW counts steps in a tensor for each parameter."""
    return 4 * len(training.params)


def test_offloaded_state_counts_where_it_is() -> None:
    training = Training(OPTIMIZERS["adamw"], lambda _: True)
    num_params = sum(param.numel() for param in training.params)
    for num_steps in (0, 2):
        training.steps(num_steps)
        row = rows_of(training)["optimizer"]
        assert (row.host_bytes, row.disk_bytes) == (STATE_BYTES * num_params, 0)
        assert row.device_bytes == (counters_bytes(training) if num_steps else 0)
    assert training.stepper is not None
    released = rows_of(training)
    training.stepper.materialize()  # as a checkpoint does: the tensors are host memory
    assert rows_of(training) == released
    reserved_bytes = sum(row.host_bytes for row in released.values())
    assert reserved_bytes == training.arena.reserved_bytes
    assert released["buffers"].host_bytes > 0

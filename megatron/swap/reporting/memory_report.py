"""Memory report at the end of a run: bytes of each kind on each tier, counted from the tensors themselves.

A storage counts once, for the first kind that has it: tied weights, views of a buffer, storages that weights and
optimizer share. An offloaded tensor counts on its tier, also while it is materialized for a checkpoint.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron.swap.common.types import MemoryRow
from megatron.swap.devices.base import Device
from megatron.swap.memory.disk_file import DiskRoom
from megatron.swap.optimizer.param_state import OffloadedTensor
from megatron.swap.reporting.summary import RankReport

GRADIENTS = ("grad", "main_grad", "decoupled_grad")
"""Attributes of a parameter that hold its gradient. ``main_grad`` is a view of Megatron's gradient buffer."""


def measure(
    report: RankReport, device: Device, chunks: Iterable[nn.Module], optimizers: Sequence[torch.optim.Optimizer],
    offloaded: Sequence[OffloadedTensor] = (),
) -> list[MemoryRow]:  # fmt: skip
    """Return a row for each kind of memory, in bytes of this rank.

    Call it before the engine is taken off Megatron and before memory is freed. ``optimizers`` are those of torch or
    TransformerEngine, inside Megatron's.
    """
    left_out = {one.tensor for one in offloaded}  # they have no device memory
    counted: set[int] = set()

    def take(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
        """Return the bytes by tier of storages that were not counted before."""
        found = {"device": 0, "host": 0}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor not in left_out and storage._cdata not in counted:
                counted.add(storage._cdata)
                found["device" if storage.device.type == device.torch_device.type else "host"] += storage.nbytes()
        return found

    params = [param for chunk in chunks for param in chunk.parameters()]
    stepped = [param for one in optimizers for group in one.param_groups for param in group["params"]]
    weights = take(params)
    gradients = take(gradient for param in (*params, *stepped) for gradient in _gradients(param))
    state = take((*stepped, *_tensors([one.state for one in optimizers])))
    on_disk = sum(one.num_bytes for one in offloaded if isinstance(one.backing, DiskRoom))
    in_host = sum(one.num_bytes for one in offloaded) - on_disk
    peak_bytes, reserved_bytes = report.device_peak_bytes, device.peak_reserved_bytes()
    if peak_bytes is None or reserved_bytes is None:
        activations = report.saved_peak_bytes or 0  # without a GPU: the most bytes that autograd held
    else:
        activations = max(0, peak_bytes - weights["device"] - gradients["device"] - state["device"])
    swapped, spilled = report.host_leased_peak_bytes, report.disk_leased_peak_bytes
    return [
        MemoryRow("weights", weights["device"], weights["host"]),
        MemoryRow("gradients", gradients["device"], gradients["host"]),
        MemoryRow("optimizer", state["device"], state["host"] + in_host, on_disk),
        MemoryRow("activations", activations, swapped, spilled),
        MemoryRow(
            # Host memory and disk space reserved beyond the use of state, and of activations at their peak.
            "buffers", 0, report.host_booked_bytes + report.optimizer_host_bytes - swapped - in_host,
            report.disk_booked_bytes + report.optimizer_disk_bytes - spilled - on_disk,
        ),
        MemoryRow("fragments", 0 if reserved_bytes is None else reserved_bytes - (peak_bytes or 0)),
    ]  # fmt: skip


def _gradients(param: torch.Tensor) -> Iterator[torch.Tensor]:
    return _tensors([getattr(param, name, None) for name in GRADIENTS])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a nest of dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)

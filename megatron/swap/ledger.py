"""Where every byte is at the end of a run: kinds by tier, counted from the tensors themselves.

A storage counts once, for the first kind that has it: tied weights, views of a buffer, and what weights and optimizer
share. What rests counts where it rests, also while it is shown for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron.swap.devices.base import Device
from megatron.swap.disk_file import DiskRoom
from megatron.swap.resting import Home
from megatron.swap.summary import RankReport
from megatron.swap.types import MemoryRow

GRADIENTS = ("grad", "main_grad", "decoupled_grad")
"""Names that torch and Megatron give to a parameter's gradient; ``main_grad`` is a view of a buffer for all of them."""


def measure(
    report: RankReport,
    device: Device,
    chunks: Iterable[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    homes: Sequence[Home] = (),
) -> list[MemoryRow]:
    """One row a kind, in bytes of this rank. Before anything is taken out or given back.

    On the device activations are what is left of the peak; without a GPU what autograd held of RAM. Buffers are host
    memory and disk that was booked beyond what rests there, or was swapped there at most.

    Args:
        report: what was booked, and the peaks.
        chunks: the model's.
        homes: what of the optimizers rests.
    """
    storages = _Storages(device.torch_device, homes)
    params = [param for chunk in chunks for param in chunk.parameters()]
    stepped = [param for one in optimizers for group in one.param_groups for param in group["params"]]
    weights = storages.take(params)
    gradients = storages.take(gradient for param in (*params, *stepped) for gradient in _gradients(param))
    state = storages.take((*stepped, *_tensors([one.state for one in optimizers])))
    on_disk = sum(home.num_bytes for home in homes if isinstance(home.room, DiskRoom))
    in_host = sum(home.num_bytes for home in homes) - on_disk

    peak_bytes, reserved_bytes = report.device_peak_bytes, device.peak_reserved_bytes()
    if peak_bytes is None or reserved_bytes is None:
        activations = report.saved_peak_bytes or 0
    else:
        activations = max(0, peak_bytes - weights["device"] - gradients["device"] - state["device"])
    swapped, spilled = report.host_leased_peak_bytes, report.disk_leased_peak_bytes
    return [
        MemoryRow("weights", weights["device"], weights["host"]),
        MemoryRow("gradients", gradients["device"], gradients["host"]),
        MemoryRow("optimizer", state["device"], state["host"] + in_host, on_disk),
        MemoryRow("activations", activations, swapped, spilled),
        MemoryRow(
            "buffers", 0, report.host_booked_bytes + report.optimizer_host_bytes - swapped - in_host,
            report.disk_booked_bytes + report.optimizer_disk_bytes - spilled - on_disk,
        ),
        MemoryRow("fragments", 0 if reserved_bytes is None else reserved_bytes - (peak_bytes or 0)),
    ]  # fmt: skip


class _Storages:
    """Storages that were counted. ``homes``: their tensors have no memory to speak of, or none of their own."""

    def __init__(self, device: torch.device, homes: Iterable[Home]) -> None:
        self._device = device
        self._resting = {home.tensor for home in homes}
        self._counted: set[int] = set()

    def take(self, tensors: Iterable[torch.Tensor]) -> dict[str, int]:
        """Bytes of those that were not counted before, by tier."""
        found = {"device": 0, "host": 0}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor not in self._resting and storage._cdata not in self._counted:
                self._counted.add(storage._cdata)
                found["device" if storage.device.type == self._device.type else "host"] += storage.nbytes()
        return found


def _gradients(param: torch.Tensor) -> Iterator[torch.Tensor]:
    return _tensors([getattr(param, name, None) for name in GRADIENTS])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All that a nest of dictionaries and lists holds."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)

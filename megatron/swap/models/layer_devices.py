"""The device that layers compute on, wherever their weights are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megatron.swap.common.types import UsageError
from megatron.swap.params.module_weights import computing_devices


def devices_of(modules: Iterable[nn.Module]) -> set[torch.device]:
    """Return the devices that ``modules`` are on. Offloaded weights count as on the device that computes with them."""
    found: set[torch.device] = set()
    for module in modules:
        offloaded = computing_devices(module)
        found |= {offloaded.get(id(tensor), tensor.device) for tensor in (*module.parameters(), *module.buffers())}
    return found


def device_of(layers: list[nn.Module]) -> torch.device:
    """Return the device that all layers are on.

    Raises:
        UsageError: on several devices, on none, or on one that is neither the CPU nor CUDA.
    """
    found = devices_of(layers)
    if len(found) != 1 or next(iter(found)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, found))) or "no device: none has parameters"
        raise UsageError(
            f"the layers are on {names}. They must all be on one, the CPU or a CUDA GPU: move the model there first, "
            "and swap the layers of each GPU by a call of its own."
        )
    return found.pop()

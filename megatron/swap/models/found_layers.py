"""Layers of a PyTorch model, in the order of its stacks, and the device that they compute on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megatron.swap.common.types import UsageError
from megatron.swap.engine.overrides import BoundsLayer
from megatron.swap.engine.sites import is_hooked
from megatron.swap.params.module_weights import computing_devices
from megatron.swap.params.stacks import is_compiled, stacked


def is_megatrons(model: nn.Module | Iterable[nn.Module]) -> bool:
    """Whether ``model``, or the first of several chunks, has a stack of Megatron's layers. Imports no Megatron."""
    chunks = [model] if isinstance(model, nn.Module) else model if isinstance(model, list | tuple) else []
    kinds = {kind for chunk in chunks if isinstance(chunk, nn.Module) for one in chunk.modules() for kind in
             type(one).__mro__}  # fmt: skip
    return any(kind.__module__ == "megatron.core.transformer.transformer_block" for kind in kinds)


def layers_of(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """Return the layers of ``model``, or those passed, each once, or raise a ``UsageError`` if that cannot be."""
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise UsageError(
            "nn.DataParallel runs copies of the layers on other GPUs, which have no boundaries. Use "
            "torch.nn.parallel.DistributedDataParallel, one process for each GPU."
        )
    # A module is never taken as a list of layers: nn.ModuleList is iterable, but may contain another one.
    found = list(dict.fromkeys(stacked(model) if isinstance(model, nn.Module) else _given(model)))
    name = type(model).__name__
    if not found:
        raise UsageError(
            f"no layers were found in {name}: it has no nn.ModuleList and no nn.Sequential with modules in it. Name "
            "the layers in the order of forward: swap.train(model, hints=[model.block1, model.block2], …)."
        )
    numbers = {layer: number for number, layer in enumerate(found)}
    for number, layer in enumerate(found):
        what = f"layer {number} of {name} ({type(layer).__name__})"
        for inner in layer.modules():
            if inner is not layer and inner in numbers:
                raise UsageError(
                    f"{what} contains layer {numbers[inner]}: layers stand one after the other, never inside each "
                    "other. Pass one of both."
                )
            if is_hooked(inner) or isinstance(getattr(inner.forward, "__self__", None), BoundsLayer):
                raise UsageError(f"{what} is swapped already: close() the other run first.")
            if any(isinstance(one, nn.parameter.UninitializedParameter) for one in inner._parameters.values()):
                raise UsageError(
                    f"{what} has parameters without a shape yet ({type(inner).__name__}). Run the model once before."
                )
            if isinstance(inner, torch.jit.ScriptModule) or is_compiled(inner):
                raise UsageError(
                    f"{what} is compiled ({type(inner).__name__}), so its saved tensors are not visible one by one. "
                    "Swap it uncompiled, and compile the whole model instead: swapped layers then run uncompiled."
                )
    return found


def _given(layers: Iterable[nn.Module]) -> list[nn.Module]:
    try:
        found = list(layers)
    except TypeError:
        found = [layers]  # type: ignore[list-item]
    for layer in found:
        if not isinstance(layer, nn.Module) or isinstance(layer, nn.ModuleList | nn.ModuleDict):
            raise UsageError(
                f"{type(layer).__name__} is given as a layer: it must be an nn.Module with a forward. Pass a "
                "model first, or its layers as a list of modules."
            )
    return found


def devices_of(modules: Iterable[nn.Module]) -> set[torch.device]:
    """Return the devices that ``modules`` are on. Offloaded weights count as on the device that computes with them."""
    found: set[torch.device] = set()
    for module in modules:
        offloaded = computing_devices(module)
        found |= {offloaded.get(id(tensor), tensor.device) for tensor in (*module.parameters(), *module.buffers())}
    return found


def device_of(layers: list[nn.Module]) -> torch.device:
    """Return the device that all layers are on. Raises a ``UsageError`` unless it is one, the CPU or CUDA."""
    found = devices_of(layers)
    if len(found) != 1 or next(iter(found)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, found))) or "no device: none has parameters"
        raise UsageError(
            f"the layers are on {names}. They must all be on one, the CPU or a CUDA GPU: move the model there first, "
            "and swap the layers of each GPU by a call of its own."
        )
    return found.pop()

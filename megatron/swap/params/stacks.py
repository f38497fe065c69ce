"""Stacks of layers in a PyTorch model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def stacked(module: nn.Module) -> Iterable[nn.Module]:
    """Yield the children of the outermost module lists and ``nn.Sequential``s; of a list among them, its children."""
    is_stack = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if is_stack and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from stacked(child)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is compiled by itself."""
    # torch.compile(module) wraps it, module.compile() notes it. Their types would import the compiler.
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None

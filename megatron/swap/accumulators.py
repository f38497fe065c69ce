"""Gradients of parameters are accumulated on the stream that computes them, so that their memory is free at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def made_here(module: nn.Module) -> list[Any]:
    """The autograd nodes that accumulate the gradients of ``module``'s parameters; call it on the compute stream.

    Such a node works on the stream that was current when it was made, and it is made when somebody first asks for it.
    Megatron asks while it wraps a model for data parallelism, on a stream of its own. From then on every gradient goes
    from the stream that computed it to that one, so the caching allocator gives its memory back only when an event has
    passed on the device; and the host, far ahead, allocates new memory meanwhile: as much as all the weight gradients
    of a micro-batch.

    A parameter refers to its node weakly: whoever wants it to be this one keeps the list. A parameter that is moved or
    converted afterwards gets another node.
    """
    with torch.enable_grad():
        views = [parameter.expand_as(parameter) for parameter in module.parameters() if parameter.requires_grad]
    return [view.grad_fn.next_functions[0][0] for view in views if view.grad_fn is not None]

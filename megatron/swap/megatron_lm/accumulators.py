"""Accumulation of gradients on the stream that computes them, so that their memory is free at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def hold_grad_accumulators(module: nn.Module) -> list[Any]:
    """Create the autograd nodes that accumulate the gradients of ``module``'s parameters, and return them.

    Call it on the compute stream, before Megatron wraps the model for data parallelism. Keep the list as long as the
    model trains: a parameter refers to its node weakly. A parameter that is moved or converted gets another node.
    """
    # A node runs on the stream of its first use. Megatron's first use is in its wrapper, on a side stream. Each
    # gradient then crosses streams, and the caching allocator frees its memory only when an event has passed on the
    # device. By then the host is far ahead and has allocated as much as all weight gradients of a micro-batch.
    with torch.enable_grad():
        views = [parameter.expand_as(parameter) for parameter in module.parameters() if parameter.requires_grad]
    return [view.grad_fn.next_functions[0][0] for view in views if view.grad_fn is not None]

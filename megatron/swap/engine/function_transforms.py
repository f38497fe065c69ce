"""Layers inside a transform of ``torch.func``: their tensors are wrappers, and their saved tensors are not.

``jvp``, ``vmap`` and ``linearize`` wrap a layer's tensors and run each operator once more on the inner tensors, where
autograd saves and calls the engine's hooks. The engine leaves the transforms for its own work between operators: inside
them its own tensors would be wrapped, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

Given = ParamSpec("Given")
Result = TypeVar("Result")


def in_transform() -> bool:
    """Whether this thread is inside a transform, or differentiates forward (``torch.autograd.forward_ad``)."""
    # Backward runs after the transform is over, so it cannot compute such results again.
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def untransformed(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return ``function`` such that it runs outside all transforms."""

    @wraps(function)
    def outside(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if _functorch.peek_interpreter_stack() is None:
            return function(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return outside


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the wrappers of all transforms: the graph outside them has this tensor."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor

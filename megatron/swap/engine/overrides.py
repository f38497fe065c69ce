"""Methods of a module that are replaced for a while, and objects that must not be copied with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from megatron.swap.common.types import UsageError


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread: a forward at this moment is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def override_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the forward of ``module`` by ``forward``. Return a function that restores the previous one."""
    return override_method(module, "forward", forward)


def override_method(module: nn.Module, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace the method ``name`` of ``module``, its own or its class's. Return a function that restores it."""
    override = _Override(function, getattr(module, name), vars(module).get(name))
    setattr(module, name, override)

    # A wrapper that other code has put around ours since stays: ours passes calls on.
    def restore() -> None:
        override.is_on = False
        outermost = found = vars(module).get(name)
        while isinstance(found, _Override) and not found.is_on:  # ours, and those below that ended before
            found = found.own
        if found is not outermost:
            delattr(module, name)
            if found is not None:
                setattr(module, name, found)

    return restore


class NotCopied:
    """Base of objects that belong to one model. A copy of them, or of that model, would share its hooks and memory."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a model that is swapped can be neither copied nor pickled (deepcopy, AveragedModel, torch.save): do that "
            "before it is swapped, or after close(). Its state_dict() can."
        )

    def _refuse_copies_of(self, module: nn.Module) -> Callable[[], None]:
        """Refuse copies of ``module``, before its attributes are copied. Return a function that allows them again."""
        return override_method(module, "__reduce_ex__", self.__reduce_ex__)


def has_boundary(module: nn.Module) -> bool:
    """Whether a layer's boundary replaces the forward of ``module``, under later replacements too."""
    override = vars(module).get("forward")
    while isinstance(override, _Override):
        if override.is_on and isinstance(getattr(override.function, "__self__", None), BoundsLayer):
            return True
        override = override.inner
    return False


class BoundsLayer(NotCopied):
    """Base of the boundary of a layer, so that other rooms can ask whether a module has one."""


class _Override:
    """Calls ``function``, or ``inner`` once it is off. A function in its place would be copied with the model."""

    def __init__(self, function: Callable[..., Any], inner: Callable[..., Any], own: Any) -> None:
        self.own = own  # the attribute of the module that it replaces; None if there was none
        self.function = function
        self.inner = self.__wrapped__ = inner  # whoever asks for the signature gets that of ``inner``
        self.is_on = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.function if self.is_on else self.inner)(*args, **kwargs)

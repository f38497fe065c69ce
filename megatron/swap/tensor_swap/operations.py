"""Hooks that run right before tensors are used, by an operation of the dispatcher or by their address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

BeforeUse = Callable[[Iterable[torch.Tensor]], None]


class Operations(TorchDispatchMode):
    """Calls ``before_use`` while active, with the tensors of every operation of this thread and of its backward."""

    def __init__(self, before_use: BeforeUse) -> None:
        super().__init__()
        self._before_use = before_use

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        self._before_use(_tensors((*args, *options.values())))
        return func(*args, **options)


class Addresses(TorchFunctionMode):
    """Calls ``before_use`` while active, with tensors whose address or contents this thread asks for."""

    def __init__(self, before_use: BeforeUse) -> None:
        super().__init__()
        self._before_use = before_use

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ASK_FOR_ADDRESS:
            self._before_use(_tensors(args))
        return func(*args, **(kwargs or {}))


ASK_FOR_ADDRESS = frozenset(
    {
        torch.Tensor.__repr__,
        torch.Tensor.__format__,
        torch.Tensor.__deepcopy__,
        torch.Tensor.untyped_storage,  # as pickling and saving do
        torch.Tensor.storage,
        torch.Tensor.share_memory_,
        torch.Tensor.data_ptr,
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.__cuda_array_interface__.__get__,  # type: ignore[attr-defined]
    }
)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of ``tensor`` without calling ``Addresses``."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments: in lists, and inside wrappers too."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
            if is_traceable_wrapper_subclass(argument):
                names, _ = argument.__tensor_flatten__()
                yield from _tensors(getattr(argument, name) for name in names)
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)

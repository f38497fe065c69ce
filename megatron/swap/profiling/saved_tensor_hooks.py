"""Saved-tensor hooks beside those of the user.

Autograd calls the innermost hooks alone. So hooks that are entered here hand each tensor to the user's hooks first, and
pack their result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch._C import _autograd
from torch.autograd.graph import disable_saved_tensors_hooks

from megatron.swap.common.types import UsageError


@dataclass(frozen=True)
class Hooks:
    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


class _Entered(NamedTuple):
    """Hooks that were entered here, by their ``pack``, and the user's hooks around them."""

    pack: Callable[[torch.Tensor], Any]
    around: Hooks | None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entered: list[_Entered] = []


_STACK = _Stack()


def is_traced() -> bool:
    """Whether operators become a graph (``torch.fx``, ``torch.func.linearize``), which must hold no engine's."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def are_hooks_off() -> bool:
    """Whether no hooks can be entered: operators are traced, or ``torch.func`` has disabled hooks."""
    return is_traced() or not _autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


def innermost_hooks() -> Hooks | None:
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else Hooks(*hooks)


def users_hooks() -> Hooks | None:
    """Return the user's hooks in force, without those that were entered here and those of a checkpoint."""
    hooks = innermost_hooks()
    if hooks is None:
        return None
    entered = _STACK.entered
    if entered and entered[-1].pack is hooks.pack:
        return entered[-1].around
    return None if is_of_checkpoint(hooks) else hooks


def is_of_checkpoint(hooks: Hooks) -> bool:
    """Whether ``hooks`` belong to a ``torch.utils.checkpoint`` with ``use_reentrant=False``."""
    return getattr(hooks.pack, "__module__", None) == "torch.utils.checkpoint"


class HooksContext(AbstractContextManager[None]):
    """A context in which autograd calls ``hooks``, behind the user's. Without effect where hooks are off."""

    def __init__(self, hooks: Hooks, *, has_around: bool = False) -> None:
        self._hooks = hooks
        self._has_around = has_around
        self._is_entered = False

    def __enter__(self) -> None:
        if are_hooks_off():
            return
        around, hooks = users_hooks(), self._hooks
        if around is not None and not self._has_around:  # hooks with ``has_around`` call the user's by themselves
            hooks = _behind(around, hooks)
        _autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
        _STACK.entered.append(_Entered(hooks.pack, around))
        self._is_entered = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_entered:
            return
        self._is_entered = False
        _STACK.entered.pop()
        _autograd._pop_saved_tensors_default_hooks()
        if trace is not None and _is_refused_by_torch(trace):
            raise UsageError(
                "PyTorch does not disable saved-tensor hooks inside of others, and torch.func.grad, vjp and their kin "
                "disable them, so they cannot be called while a layer is swapped or a step is measured. Take such a "
                "gradient by torch.autograd.grad(..., create_graph=True), or swap other layers."
            ) from error


@dataclass(frozen=True, slots=True)
class _Theirs:
    """A result of the user's ``pack`` that is no tensor."""

    packed: Any


def _behind(around: Hooks, hooks: Hooks) -> Hooks:
    def pack(tensor: torch.Tensor) -> Any:
        packed = around.pack(tensor)
        # Results of the user's ``pack`` that are no tensor stay as they are.
        return hooks.pack(packed) if isinstance(packed, torch.Tensor) else _Theirs(packed)

    def unpack(packed: Any) -> torch.Tensor:
        return around.unpack(packed.packed if type(packed) is _Theirs else hooks.unpack(packed))

    return Hooks(pack, unpack)


def _is_refused_by_torch(trace: TracebackType) -> bool:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code is disable_saved_tensors_hooks.__wrapped__.__code__  # type: ignore[attr-defined]

"""Training steps of a loop that was not written for this package: seen by themselves, or told."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron.swap.common.collectives import rank_and_world_size
from megatron.swap.common.types import UsageError
from megatron.swap.engine.overrides import override_method
from megatron.swap.engine.recomputed_run import RunChecks


def params_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters that ``optimizer`` steps: none if it is not torch's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    return [param for group in optimizer.param_groups for param in group["params"]]


def check_optimizer(
    optimizer: Any, modules: Iterable[nn.Module], stepped: Callable[[Any], list[torch.Tensor]] = params_of
) -> None:
    """Raise a ``UsageError`` unless ``optimizer`` is None or steps parameters of ``modules``, if ``stepped`` tells."""
    if optimizer is None:
        return
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    mine = {id(param) for module in modules for param in module.parameters()}
    if kind is optimizer:
        wrong = "is a class"
    elif any("Scheduler" in base.__name__ for base in kind.__mro__):
        wrong = "schedules learning rates"
    elif not callable(getattr(optimizer, "step", None)):
        wrong = "has no step"
    elif (params := stepped(optimizer)) and not any(id(param) in mine for param in params):
        wrong = f"steps {len(params)} parameters, and none of them is this model's"
    else:
        return
    raise UsageError(
        f"optimizer: {kind.__name__} {wrong}. Pass the optimizer that was made for this model, Megatron's or torch's; "
        "or leave it out: a step then ends when any optimizer of the model's parameters has stepped."
    )


def holds_params_of(optimizer: torch.optim.Optimizer, chunks: Iterable[nn.Module]) -> bool:
    """Whether ``optimizer`` steps parameters of these chunks, or Megatron's main copies of them."""
    params = set(map(id, params_of(optimizer)))
    mine = (param for chunk in chunks for param in chunk.parameters())
    return any(id(param) in params or id(getattr(param, "main_param", None)) in params for param in mine)


def read_checks(checks: RunChecks, chunks: Iterable[nn.Module]) -> Callable[[], None]:
    """Let ``checks`` be read before the chunks' optimizers step or a state is saved. Return the end of that."""
    of, mine = weakref.ref(checks), [weakref.ref(chunk) for chunk in chunks]
    known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    handles: list[RemovableHandle] = []

    def saves(*_: object) -> None:
        if (here := of()) is not None:
            here.read()

    def steps(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if (here := of()) is None:
            return
        if optimizer not in known:
            if not holds_params_of(optimizer, [chunk for one in mine if (chunk := one()) is not None]):
                return
            known.add(optimizer)
            handles.append(optimizer.register_state_dict_pre_hook(saves))
        here.before_step()

    handles += [one.register_state_dict_pre_hook(saves) for one in chunks]
    handles.append(register_optimizer_step_pre_hook(steps))

    def end() -> None:
        while handles:
            handles.pop().remove()

    for dead in [one for one in _reading if one() is None]:  # dropped without an end
        _reading.pop(dead)()
    _reading[of] = end
    return end


# Ends of `read_checks`. No finalizer calls them: PyTorch may be walking its hooks.
_reading: dict[weakref.ref[RunChecks], Callable[[], None]] = {}


_watching: weakref.WeakSet[TrainingSteps] = weakref.WeakSet()
"""PyTorch's hook on all optimizers lives as long as the process. It must not hold models that were deleted."""
_hooks: list[RemovableHandle] = []
"""The hook, while anybody watches. No finalizer removes it: PyTorch may be walking its hooks."""


def _optimizer_stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for steps in list(_watching):
        steps.saw_step_of(optimizer)


class TrainingSteps:
    """Counts forwards and steps, and calls ``on_end`` with the number of the step that has ended, from 1."""

    def __init__(self, on_end: Callable[[int], None]) -> None:
        self.number = 0  # steps that have ended
        self.num_forwards = self._last_num_forwards = 0
        self._on_end = on_end
        self._chunks: list[nn.Module] = []
        self.is_followed = False  # this object sees the ends of steps, or is told
        self._is_told = self._was_stepped = False

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of this step: as many as in the last one, until there are more."""
        return max(self.num_forwards, self._last_num_forwards)

    def follow(self, optimizer: Any, chunks: Iterable[nn.Module]) -> Callable[[], None]:
        """Learn of each step of ``optimizer``; None: of any of the chunks' optimizers. Return the end of that."""
        self.is_followed = True
        if optimizer is None:
            self._chunks = list(chunks)
            _watching.add(self)
            if not _hooks:
                _hooks.append(register_optimizer_step_post_hook(_optimizer_stepped))
            return self._stop_watching
        if isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_post_hooks" in vars(optimizer):
            return optimizer.register_step_post_hook(lambda *_: self.optimizer_stepped()).remove
        method = optimizer.step

        @functools.wraps(method)
        def step(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            self.optimizer_stepped()
            return result

        return override_method(optimizer, "step", step)

    def _stop_watching(self) -> None:
        _watching.discard(self)
        self._chunks = []
        while _hooks and not _watching:
            _hooks.pop().remove()

    def saw_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that ``optimizer`` has stepped, which may be another model's."""
        if holds_params_of(optimizer, self._chunks):
            self._was_stepped = True

    def optimizer_stepped(self) -> None:
        """End the step, since its only optimizer has stepped, unless the ends of steps are told."""
        if not self._is_told:
            self._end()

    def forward_begins(self) -> None:
        """Count a forward, after the end of the last step, if that was seen."""
        if self._was_stepped and not self._is_told:
            self._end()
        self.num_forwards += 1

    def evaluation_begins(self) -> None:
        """End the step if its optimizer has stepped, so that an evaluation is no part of it."""
        # One of several ranks may evaluate while the others wait for it, so a collective would hang.
        if self._was_stepped and not self._is_told and rank_and_world_size()[1] == 1:
            with torch.inference_mode(False), torch.enable_grad():  # memory that is allocated now must serve training
                self._end()

    def tell(self) -> None:
        """End the step. From the first call on, optimizers are not watched any more."""
        self._is_told = True
        self._end()

    def _end(self) -> None:
        self._was_stepped = False
        if not self.num_forwards:  # a step without a forward does not end
            return
        self.number += 1
        self._last_num_forwards, self.num_forwards = self.num_forwards, 0
        self._on_end(self.number)

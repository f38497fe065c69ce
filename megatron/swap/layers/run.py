"""A layer as its boundary sees it, and one run of the layer in one forward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from megatron.swap.common.types import LayerPosition, Site
from megatron.swap.engine.handle import Group
from megatron.swap.engine.layer_state import Attributes, LayerState

# Calls a function with tensors, and again in backward with the same random numbers; saves only these tensors.
Checkpoint = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """The way in which a framework's layers run again, if torch's checkpoint does not serve."""

    checkpoint: Callable[[], Checkpoint]  # returns the checkpoint; called when the policy changes
    forked: Callable[[], AbstractContextManager[None]] | None = None  # as for RunChecks.run, like the next two
    may_have_gradients: bool = False
    is_well_known: bool = False
    # Context for the run in forward of a layer that runs again.
    first_run: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer, and its special features."""

    module: nn.Module
    number: int  # over the whole model, 0-based; preliminary while the order of the runs is learned
    attributes: Attributes = lambda _: None  # as for StateReader
    # None: the layer runs again in torch's checkpoint, and must not run inside another checkpoint.
    rerun: Rerun | None = None
    # Called with the layer's number when the layer runs without gradients.
    on_run_without_grad: Callable[[int], None] | None = None
    # Whether autocast keeps its casts of weights while the layer runs, in forward and in a second run. If not, a cast
    # is one of the tensors that the layer saves.
    autocast_cache: bool = True


@dataclass(slots=True, eq=False)
class LayerRun:
    """One run of a layer in one forward."""

    number: int  # over the whole model
    position: LayerPosition
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nth: int = 0  # number among the layer's runs in this forward
    checkpoint: Checkpoint | None = None  # runs the layer again in backward; None if it runs once
    kind: Hashable = None  # runs of one kind save alike; set while steps are measured
    like: tuple[int, ...] = ()  # runs that are measured in its place
    runs_once: bool = False  # a second run would save other tensors, so there is none
    sources: dict[int, Site] | None = None  # sites of the inputs that operators may be recomputed from
    before: LayerState | None = None  # state that the layer read; set while steps are measured
    hidden: Any = field(init=False)  # the hidden states among the arguments
    group: Group = field(init=False)

    def __post_init__(self) -> None:
        named = self.kwargs.get("hidden_states")
        if isinstance(named, torch.Tensor):
            self.hidden = named
        elif self.args and isinstance(self.args[0], torch.Tensor):
            self.hidden = self.args[0]
        else:
            self.hidden = next(self.tensors(), None)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that the layer is called with."""
        return tensors_of([self.args, self.kwargs])

    def is_input(self, value: Any) -> bool:
        """Whether a layer that runs again saves ``value``. Masks and such stay on the device anyway."""
        return isinstance(value, torch.Tensor) and (value.requires_grad or value is self.hidden)

    def inputs(self) -> list[torch.Tensor]:
        """Return the tensors that a layer which runs again saves."""
        return list(filter(self.is_input, self.tensors()))


@dataclass(frozen=True)
class PlannedRun:
    """The part of a run that the policy decides."""

    number: int
    position: LayerPosition
    checkpoint: Checkpoint | None  # runs the layer again in backward; None if it runs once


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``, which may hold containers that are registered with PyTorch."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple):  # PyTorch's own way takes ten times as long, several times a layer
        for item in value:
            yield from tensors_of(item)
    elif type(value) is dict:
        yield from tensors_of(list(value.values()))
    elif type(value) not in (NoneType, bool, int, float, str):
        yield from (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))



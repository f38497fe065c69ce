"""Hints about a model, for a run. These fit any PyTorch model; those of a framework answer otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from megatron.swap.common.plan import Infeasible, Model
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import LINEAR, OPERATOR
from megatron.swap.devices.base import Device
from megatron.swap.engine.build import Engine
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.wrapper_tensors import WrapperRules
from megatron.swap.layers.layers import Layers
from megatron.swap.layers.learned import LearnedLayers
from megatron.swap.layers.run import LayerSpec
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_memory import HostCapacity
from megatron.swap.models.plannable import take_over

Errors = Callable[[], AbstractContextManager[None]]  # makes a context in which errors are in the caller's words
Undo = Callable[[], None]


class ModelHints:
    """Facts about a model with ``layers``, each once in the order of forward, and the changes that a run makes to it.

    Without ``model``, the whole model, nothing is planned and steps are not counted. ``autocast_cache`` is as in
    ``LayerSpec``.
    """

    recomputes_layers = True  # whole layers may be recomputed
    timeout_minutes: float | None = None  # how long a rank waits for the others; None for torch's default
    # Advice if the model alone exceeds the budget.
    remedy = "Raise the budget, or train with a smaller optimizer state or on more GPUs."
    capacity: HostCapacity | None = None  # the host's memory without the model's part; None if the model takes none
    needs: str | None = None  # what the model needs beside what there is, in words; None if it is not known
    tells_details = False  # a run prints its settings, and each tensor that should be recomputed and is not
    waits_between_steps = False  # training waits for each backward between two steps anyway

    def __init__(self, model: nn.Module | None, layers: Sequence[nn.Module], *, autocast_cache: bool = True) -> None:
        # Modules whose forwards the run follows.
        self.chunks: list[nn.Module] = [] if model is None else [model]
        self._layers = tuple(layers)
        self._num_layers = len(self._layers)  # when the run is over, too
        self._autocast_cache = autocast_cache
        self._learned: LearnedLayers | None = None

    # ------------------------------------------------------------------- before there is an engine

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """All layers of this rank, in the order of forward."""
        return self._layers

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model, over all ranks."""
        return self._num_layers

    def describe(self) -> Model:
        """Return the model as plan files describe it, as far as it is known now."""
        assert self._learned is not None
        return self._learned.describe(self.chunks[0])

    def kinds(self, settings: Settings) -> tuple[str, ...]:
        """Return the kinds of producers whose outputs may be recomputed."""
        return (OPERATOR, LINEAR) if settings.auto else ()

    def least_host_bytes(self, settings: Settings) -> int:
        """Return a lower bound of the bytes that this rank offloads at once; 0: it is not known."""
        return 0

    def wrappers(self) -> WrapperRules | None:
        """Return the rules for the wrapper tensors of low precision; ``None``: there are none."""
        return None

    def state_store(
        self, settings: Settings, device: Device, num_micro_batches: Callable[[], int], host_bytes: int,
        disk: DiskFile | None,
    ) -> Any:  # fmt: skip
        """Return the object that offloads optimizer state, ``host_bytes`` at most, and the rest to ``disk``."""
        raise NotImplementedError  # refused before: only Megatron's optimizers are adapted

    # ------------------------------------------------------------------- when the model is there

    def prepare(self, chunks: Sequence[nn.Module], settings: Settings) -> Iterator[tuple[list[Undo], str | None]]:
        """Change the model, or raise a ``UsageError``. Yield how to undo each change, and a line that tells of it."""
        for chunk in chunks if settings.auto else ():
            yield from take_over(chunk)

    def bound(
        self, engine: Engine, policy: Policy, settings: Settings, errors: Errors, is_measuring: Callable[[], bool],
        has_room: Callable[[int], bool],
    ) -> Layers:  # fmt: skip
        """Return the layers; those known by chunk get boundaries in ``Layers.add``. Functions as for ``AlikeRuns``."""
        if settings.auto:
            self._learned = LearnedLayers(
                self.layers, engine.saved_tensors, policy, is_measuring, has_room,
                autocast_cache=self._autocast_cache, errors=errors,
            )  # fmt: skip
            return self._learned
        layers = Layers(engine.saved_tensors, policy, errors)
        layers.install([
            LayerSpec(module=layer, number=number, autocast_cache=self._autocast_cache)
            for number, layer in enumerate(self.layers)
        ])  # fmt: skip
        return layers

    def unbound(self) -> None:
        """Note that the boundaries are removed."""

    def forget_model(self) -> None:
        """Hold the model no longer: the run is over."""
        self.chunks, self._layers, self._learned = [], (), None

    def pipeline_rank(self) -> int:
        """Return this rank's stage of the pipeline."""
        return 0

    def first_forward(self, arguments: Sequence[Any], options: Mapping[str, Any], settings: Settings) -> None:
        """Note the first forward's arguments, or raise a ``UsageError`` if the plan is another model's."""

    # ------------------------------------------------------------------- between steps

    def step_line(self, budget_gib: float | None) -> str | None:
        """Return a line to print behind a step, once. ``budget_gib`` is the planner's, or None without a planner."""
        return None

    def explained(self, error: Infeasible, budget_gib: float) -> Infeasible:
        """Return ``error`` in the words of the call that named the budget."""
        least = f"{error.smallest_gib:.10g}"
        return Infeasible(
            f"no plan stays below {budget_gib:.10g} GiB: the smallest budget that was found feasible is {least} GiB. "
            f"Give memory_gib={least} or more, a smaller batch, or shorter sequences.",
            error.smallest_gib,
        )

"""The boundaries around all layers of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from megatron.swap.common.site_paths import NON_LAYER
from megatron.swap.common.types import UsageError, layer_positions
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.saved_tensors import SavedTensors
from megatron.swap.engine.sites import SiteNames
from megatron.swap.layers.boundary import Boundary
from megatron.swap.layers.run import LayerRun, LayerSpec, PlannedRun
from megatron.swap.layers.whole import torch_checkpoint


def _nothing() -> None:
    pass


class Layers:
    """The boundaries around the layers of this rank, whose numbers are given. ``remove`` removes them."""

    def __init__(
        self, saved_tensors: SavedTensors, policy: Policy,
        errors: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self.boundaries: list[Boundary] = []
        self.errors = errors  # makes a context in which errors have the caller's spelling
        self.have_run_unhooked = False  # layers have run where autograd calls no hooks: nothing was swapped
        self._saved_tensors = saved_tensors
        self._policy = policy
        self._chunks: list[tuple[list[Boundary], bool]] = []
        self._runs: dict[Boundary, list[PlannedRun]] = {}
        self._names: dict[nn.Module, SiteNames] = {}

    def install(self, specs: Sequence[LayerSpec], *, ends_in_loss: bool = True) -> None:
        """Put boundaries around a chunk's layers, or raise a ``UsageError`` if one that must not is to run again."""
        policy, chunk = self._policy, list[Boundary]()
        self._chunks.append((chunk, ends_in_loss))
        try:
            for spec in specs:
                is_made = policy.recomputes_layer(spec.number) and not policy.recomputes_whole(spec.number)
                hooked = policy.swaps_layer(spec.number) or is_made or self._saved_tensors.manager.guard.is_on
                boundary = self._boundary(spec, hooked)
                chunk.append(boundary)
                self.boundaries.append(boundary)
            self._plan_runs()
        except BaseException:
            Layers.remove(self)
            raise

    def _boundary(self, spec: LayerSpec, hooked: bool) -> Boundary:
        return Boundary(spec, self._saved_tensors, self, hooked=hooked)

    # ------------------------------------------------------------------- asked by boundaries

    def begin(self, boundary: Boundary, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerRun | None:
        """Begin a run with gradients. None: the layer runs as if it had no boundary."""
        (planned,) = self._runs[boundary]
        return LayerRun(planned.number, planned.position, args, kwargs, checkpoint=planned.checkpoint)

    def is_in_layer(self) -> bool:
        """Whether the forward of a layer runs now, so that what it calls is part of it."""
        return False  # each layer that was named has its own groups, also within another's forward

    def is_idle(self) -> bool:
        """Whether a layer may run as if it had no boundary, because everything is kept."""
        return self._policy.is_idle and not self._saved_tensors.manager.guard.is_on

    def in_checkpoint(self, boundary: Boundary) -> None:
        """Raise a ``UsageError`` for a swapped layer inside a checkpoint of the user's: it would save no tensors."""
        (planned,) = self._runs[boundary]
        if planned.position.swapped:
            raise UsageError(
                f"layer {planned.number} ({type(boundary.module).__name__}) is to be swapped, but runs inside an "
                "activation checkpoint, so it saves no tensors. Switch checkpointing off for it "
                "(Hugging Face: model.gradient_checkpointing_disable()) or swap other layers."
            )

    def unhooked(self) -> None:
        """Note that a layer runs with gradients where autograd calls no hooks."""
        self.have_run_unhooked = True

    def on_backward(self, boundary: Boundary) -> Callable[[], None]:
        """Return the callback for the moment when backward enters the run that has ended. The graph holds it."""
        return _nothing

    # ------------------------------------------------------------------- asked by a run

    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the layers of each model chunk of this rank, in the order of forward."""
        return tuple(tuple(boundary.spec.number for boundary in chunk) for chunk, _ in self._chunks)

    @property
    def has_chunks(self) -> bool:
        """Whether any chunk of this rank has a stack, with layers or without."""
        return bool(self._chunks)

    def apply_policy(self, window_bytes: int | None) -> None:
        """Apply the changed policy from the next forward on. Call this between steps; its layers must all be hooked."""
        self._plan_runs()
        self._saved_tensors.manager.apply_policy(window_bytes)

    def _plan_runs(self) -> None:
        for chunk, ends_in_loss in self._chunks:
            self._plan_chunk([(boundary, boundary.spec.number) for boundary in chunk], ends_in_loss)

    def _plan_chunk(self, runs: Sequence[tuple[Boundary, int]], ends_in_loss: bool) -> None:
        """Plan ``runs``, boundaries and numbers in the order of forward."""
        positions = layer_positions([self._policy.swaps_layer(number) for _, number in runs], ends_in_loss)
        planned: dict[Boundary, list[PlannedRun]] = {}
        for (boundary, number), position in zip(runs, positions, strict=True):
            checkpoint, rerun = None, boundary.spec.rerun
            if self._policy.recomputes_whole(number):
                checkpoint = torch_checkpoint if rerun is None else rerun.checkpoint()
            planned.setdefault(boundary, []).append(PlannedRun(number, position, checkpoint))
        self._runs |= planned

    def add(self, chunk: nn.Module) -> None:
        """Put boundaries around the layers of ``chunk``. Nothing here: ``install`` had all layers."""

    def begin_forward(self) -> None:
        """Begin a forward of the model, before its first layer runs."""

    def around(self, chunk: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for the forward of ``chunk`` that records tensors saved outside its layers."""
        if not self._saved_tensors.is_recorded:
            return nullcontext()
        if chunk not in self._names:
            self._names[chunk] = SiteNames(NON_LAYER, chunk, without=[one.module for one in self._bounded()])
        return self._saved_tensors.outside_layers(self._names[chunk])

    def _bounded(self) -> Sequence[Boundary]:
        """Return the boundaries of the layers that are not counted as outside."""
        return self.boundaries

    def remove(self) -> None:
        """Give all layers back their own forward."""
        for boundary in reversed(self.boundaries):
            boundary.remove()
        for names in self._names.values():
            names.remove()
        self.boundaries.clear()
        self._chunks.clear()
        self._names.clear()

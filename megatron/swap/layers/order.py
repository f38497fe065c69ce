"""The order in which a model runs its layers, learned from the first step.

A layer may run several times in a forward, and a model may run its layers in another order than it lists them. So the
first step is not recorded. From the second step on the runs of a forward are numbered in their order, and each has an
action of its own. Forwards run one at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.swap.common.types import UsageError
from megatron.swap.layers.boundary import Boundary
from megatron.swap.layers.run import LayerRun


@dataclass
class _Seen:
    """Facts about the runs of a layer."""

    has_backward: bool = False  # a backward has entered the layer
    is_entered: bool = False  # one has since the last forward of the model began
    graph: weakref.ref[Any] | None = None  # of the last run in this forward
    num_runs: int = 0  # in this forward


class RunOrder:
    """Learns the order of the runs of a forward."""

    def __init__(self) -> None:
        self.boundaries: list[Boundary] = []  # of the runs, in their order; of all layers before it is known
        self.is_known = False
        # Layers that run as if they had no boundary: their tensors count as saved outside the layers.
        self.apart: set[Boundary] = set()
        self.hidden_shape: tuple[int, ...] = ()  # of the first run's hidden states; empty before it
        self._seen: dict[Boundary, _Seen] = {}
        self._forward: list[Boundary] = []
        self._longest: list[Boundary] = []

    def add(self, boundary: Boundary) -> None:
        """Learn of the runs of one more layer."""
        self.boundaries.append(boundary)
        self._seen[boundary] = _Seen()

    def begin_forward(self, *, is_measuring: bool) -> None:
        """Begin a forward, or raise a ``UsageError`` if the last one waits for its backward in measured steps."""
        seen = self._seen.values()
        has_graph = any(one.graph is not None and one.graph() is not None for one in seen)
        if (is_measuring or not self.is_known) and has_graph and not any(one.is_entered for one in seen):
            raise UsageError(
                "a forward begins before the backward of the last one, and memory_gib plans one forward at a time. "
                "Run backward after each forward, concatenate the batches into one, or swap layers without a budget. "
                "Where a step is skipped, delete its loss (del loss)."
            )
        for one in seen:
            one.is_entered, one.graph, one.num_runs = False, None, 0
        self._forward = []

    def runs(self, boundary: Boundary) -> int:
        """Note that a forward runs the layer of ``boundary``. Return the run's number among the layer's runs."""
        if not self.is_known:
            self._forward.append(boundary)
            if len(self._forward) > len(self._longest):
                self._longest = list(self._forward)
        seen = self._seen[boundary]
        seen.num_runs += 1
        return seen.num_runs - 1

    def note_shape(self, run: LayerRun) -> None:
        """Note the shape of the first hidden states."""
        if not self.hidden_shape and isinstance(run.hidden, torch.Tensor) and not run.hidden.is_nested:
            self.hidden_shape = tuple(run.hidden.shape)

    def on_backward(self, boundary: Boundary) -> Callable[[], None]:
        """Return the callback for the moment when backward enters the run that has ended."""
        seen = self._seen[boundary]

        def entered() -> None:
            seen.has_backward = seen.is_entered = True

        # The graph holds the callback, so its life shows whether the graph exists.
        seen.graph = weakref.ref(entered)
        return entered

    def seen(self) -> list[Boundary]:
        """Return the layers of the longest forward that a backward has entered, in the order of their runs."""
        return [boundary for boundary in self._longest if self._seen[boundary].has_backward]

    def learn(self) -> tuple[list[Boundary], list[Boundary]]:
        """Number the runs as in ``seen``; others run apart. Return those with no backward, then those elsewhere."""
        everything, self.boundaries = self.boundaries, self.seen()
        self.is_known = True
        apart = [boundary for boundary in everything if boundary not in self.boundaries]
        self.apart = set(apart)
        elsewhere = [boundary for boundary in apart if self._seen[boundary].has_backward]
        return [boundary for boundary in apart if boundary not in elsewhere], elsewhere

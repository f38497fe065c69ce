"""What a step saved, layer by layer, in a few numbers each: cheap enough to count always, enough to see a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class LayerFootprint(NamedTuple):
    """A layer's: what it saved, each the most of all its micro-batches.

    Attributes:
        num_tensors, num_bytes: 0 of a layer that is recomputed whole, or has no hooks: what it saves is not seen.
        input_bytes: of the hidden states that it was called with.
    """

    layer: int
    num_tensors: int
    num_bytes: int
    input_bytes: int = 0


@dataclass(frozen=True)
class Footprint:
    """A step's.

    Bytes are those of the storages, counted for every tensor that was saved on them. Equal whatever the policy did, but
    for layers that were not seen, and hashable.
    """

    layers: tuple[LayerFootprint, ...]

    @property
    def num_bytes(self) -> int:
        """Of all layers."""
        return sum(entry.num_bytes for entry in self.layers)

    @property
    def num_tensors(self) -> int:
        """Of all layers."""
        return sum(entry.num_tensors for entry in self.layers)

    def filled_from(self, measured: Footprint) -> Footprint:
        """With what ``measured`` has of the layers that were not seen, in proportion to their inputs."""
        known = {entry.layer: entry for entry in measured.layers}
        return Footprint(tuple(_filled(entry, known.get(entry.layer, entry)) for entry in self.layers))

    def or_more(self, other: Footprint) -> Footprint:
        """Of each layer the most of both."""
        layers = {entry.layer: entry for entry in self.layers}
        for entry in other.layers:
            layers[entry.layer] = _most(layers.get(entry.layer, entry), entry)
        return Footprint(tuple(layers[layer] for layer in sorted(layers)))


def _most(one: LayerFootprint, other: LayerFootprint) -> LayerFootprint:
    return LayerFootprint(*map(max, one, other))


def _filled(entry: LayerFootprint, measured: LayerFootprint) -> LayerFootprint:
    if entry.num_tensors or not measured.input_bytes:
        return entry
    num_bytes = measured.num_bytes * entry.input_bytes // measured.input_bytes
    return LayerFootprint(entry.layer, measured.num_tensors, num_bytes, entry.input_bytes)


class FootprintMeter:
    """Counts the footprint of the step that runs."""

    def __init__(self) -> None:
        self._num_tensors = self._num_bytes = self._input_bytes = 0
        self._layers: dict[int, LayerFootprint] = {}
        self._limits: dict[int, float] = {}
        self._input_limits: dict[int, float] = {}
        self._above_bytes = 0.0
        self._exceeded: Callable[[], None] | None = None

    def expect(self, footprint: Footprint | None, factor: float, exceeded: Callable[[], None]) -> None:
        """From now on tell ``exceeded`` where a chunk saves more than ``factor`` times what ``footprint`` has.

        It is told in mid-forward, right after each layer up to which that is so; and before each layer whose input
        alone is so much larger, when nothing of it is saved yet. ``None``: no more.
        """
        layers = () if footprint is None else footprint.layers
        self._limits = {entry.layer: factor * entry.num_bytes for entry in layers}
        self._input_limits = {entry.layer: factor * entry.input_bytes for entry in layers}
        self._exceeded = exceeded

    def begin_chunk(self) -> None:
        """A forward of a model chunk begins."""
        self._above_bytes = 0.0

    def begin_layer(self, layer: int, input_bytes: int = 0) -> None:
        """``layer``'s forward begins, with hidden states of ``input_bytes``; one that broke off counts for nothing."""
        self._num_tensors = self._num_bytes = 0
        self._input_bytes = input_bytes
        if self._exceeded is not None and input_bytes > self._input_limits.get(layer, input_bytes):
            self._exceeded()

    def add(self, num_bytes: int) -> None:
        """The layer saved a tensor, on a storage of ``num_bytes``."""
        self._num_tensors += 1
        self._num_bytes += num_bytes

    def end_layer(self, layer: int, unseen: bool = False) -> None:
        """``layer``'s forward is over. ``unseen``: it runs again as a whole, or ran without hooks."""
        saved = (0, 0) if unseen else (self._num_tensors, self._num_bytes)
        entry = LayerFootprint(layer, *saved, self._input_bytes)
        self._layers[layer] = _most(self._layers.get(layer, entry), entry)
        if not unseen:
            self._above_bytes += self._num_bytes - self._limits.get(layer, self._num_bytes)
        if self._exceeded is not None and self._above_bytes > 0:
            self._exceeded()

    def take(self) -> Footprint:
        """The footprint since the last call: of a step, at its end."""
        layers, self._layers = self._layers, {}
        return Footprint(tuple(layers[layer] for layer in sorted(layers)))

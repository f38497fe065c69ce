"""Tensors and bytes that each layer saved in a step, counted in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class LayerFootprint(NamedTuple):
    """Tensors and bytes that a layer saved in a step, the most of any micro-batch."""

    layer: int
    num_tensors: int  # 0, as ``num_bytes``, in layers recomputed whole or without hooks
    num_bytes: int
    input_bytes: int = 0  # bytes of the hidden states that the layer was called with


@dataclass(frozen=True)
class Footprint:
    """Tensors and bytes that each layer saved in a step, the same under any policy for layers that were seen."""

    layers: tuple[LayerFootprint, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.layers)

    @property
    def num_tensors(self) -> int:
        return sum(entry.num_tensors for entry in self.layers)

    def filled_from(self, measured: Footprint) -> Footprint:
        """Return a copy whose unseen layers have the figures of ``measured``, scaled by input size."""
        known = {entry.layer: entry for entry in measured.layers}
        return Footprint(tuple(_filled(entry, known.get(entry.layer, entry)) for entry in self.layers))

    def maximum(self, other: Footprint) -> Footprint:
        layers = {entry.layer: entry for entry in self.layers}
        for entry in other.layers:
            layers[entry.layer] = LayerFootprint(*map(max, layers.get(entry.layer, entry), entry))
        return Footprint(tuple(layers[layer] for layer in sorted(layers)))


def _filled(entry: LayerFootprint, measured: LayerFootprint) -> LayerFootprint:
    if entry.num_tensors or not measured.input_bytes:
        return entry
    num_bytes = measured.num_bytes * entry.input_bytes // measured.input_bytes
    return LayerFootprint(entry.layer, measured.num_tensors, num_bytes, entry.input_bytes)


class FootprintMeter:
    def __init__(self) -> None:
        self._num_tensors = self._num_bytes = self._input_bytes = 0
        self._like: int | None = None
        self._layers: dict[int, LayerFootprint] = {}
        self._limits: dict[int, float] = {}
        self._input_limits: dict[int, float] = {}
        self._excess_bytes = 0.0
        self._exceeded: Callable[[], None] | None = None

    def expect(self, footprint: Footprint | None, factor: float, exceeded: Callable[[], None]) -> None:
        """Call ``exceeded`` where a chunk saves more than ``factor`` times the bytes of ``footprint``; None: never."""
        layers = () if footprint is None else footprint.layers
        self._limits = {entry.layer: factor * entry.num_bytes for entry in layers}
        self._input_limits = {entry.layer: factor * entry.input_bytes for entry in layers}
        self._exceeded = exceeded

    def begin_chunk(self) -> None:
        self._excess_bytes = 0.0

    def begin_layer(self, layer: int, input_bytes: int = 0) -> None:
        self._num_tensors = self._num_bytes = 0  # a forward that did not end is dropped
        self._like = None
        self._input_bytes = input_bytes
        # Nothing of the layer is saved yet, so the caller can still swap all of it.
        if self._exceeded is not None and input_bytes > self._input_limits.get(layer, input_bytes):
            self._exceeded()

    def add(self, num_bytes: int) -> None:
        self._num_tensors += 1
        # The whole storage, for each tensor on it: so the policy does not change the footprint.
        self._num_bytes += num_bytes

    def is_like(self, other: int) -> None:
        """Give the layer, whose saved tensors are not seen, the figures of ``other``."""
        self._like = other

    def end_layer(self, layer: int, is_unseen: bool = False) -> None:
        """End the forward of ``layer``. ``is_unseen``: its saved tensors were not seen."""
        saved = (0, 0) if is_unseen else (self._num_tensors, self._num_bytes)
        if self._like is not None:
            saved = self._layers[self._like].num_tensors, self._layers[self._like].num_bytes
        entry = LayerFootprint(layer, *saved, self._input_bytes)
        self._layers[layer] = LayerFootprint(*map(max, self._layers.get(layer, entry), entry))
        if not is_unseen:
            self._excess_bytes += self._num_bytes - self._limits.get(layer, self._num_bytes)
        # ``exceeded`` may be called several times in a forward.
        if self._exceeded is not None and self._excess_bytes > 0:
            self._exceeded()

    def take(self) -> Footprint:
        """Return the footprint since the last call. Call this method at each step's end."""
        layers, self._layers = self._layers, {}
        return Footprint(tuple(layers[layer] for layer in sorted(layers)))

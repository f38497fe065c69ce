"""What a step saved, layer by layer, in two numbers each: cheap enough to count always, enough to see a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """From one step to another.

    Attributes:
        sites: layers came or went, or a layer saves another number of tensors.
        layer: whose bytes changed most, of the layers that both have; ``None``: none did.
        ratio: its bytes now to those before.
    """

    sites: bool
    layer: int | None = None
    ratio: float = 1.0

    def exceeds(self, share: float) -> bool:
        """Whether sites changed, or a layer's bytes by more than ``share`` of what they were."""
        return self.sites or abs(self.ratio - 1) > share


@dataclass(frozen=True)
class Footprint:
    """A step's: ``layers`` has (layer, tensors, bytes), each the most of all its micro-batches.

    Bytes are those of the storages, counted for every tensor that was saved on them. Equal whatever the policy did, and
    hashable.
    """

    layers: tuple[tuple[int, int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Of all layers."""
        return sum(num_bytes for _, _, num_bytes in self.layers)

    @property
    def num_tensors(self) -> int:
        """Of all layers."""
        return sum(num_tensors for _, num_tensors, _ in self.layers)

    def filled_from(self, other: Footprint) -> Footprint:
        """With the layers of ``other`` that it has not: those that were recomputed whole saved nothing to count."""
        layers = {entry[0]: entry for entry in (*other.layers, *self.layers)}
        return Footprint(tuple(layers[layer] for layer in sorted(layers)))

    def change_from(self, earlier: Footprint) -> Change:
        """What is different from ``earlier``."""
        before = {layer: (num_tensors, num_bytes) for layer, num_tensors, num_bytes in earlier.layers}
        now = {layer: (num_tensors, num_bytes) for layer, num_tensors, num_bytes in self.layers}
        sites = before.keys() != now.keys() or any(before[layer][0] != now[layer][0] for layer in before)
        ratios = {
            layer: now[layer][1] / before[layer][1]
            for layer in before.keys() & now.keys() if before[layer][1] and before[layer][1] != now[layer][1]
        }  # fmt: skip
        largest = max(sorted(ratios), key=lambda layer: abs(ratios[layer] - 1), default=None)
        return Change(sites) if largest is None else Change(sites, largest, ratios[largest])


class FootprintMeter:
    """Counts the footprint of the step that runs."""

    def __init__(self) -> None:
        self._num_tensors = self._num_bytes = 0
        self._layers: dict[int, tuple[int, int]] = {}
        self._limits: dict[int, float] = {}
        self._above_bytes = 0.0
        self._exceeded: Callable[[], None] | None = None

    def expect(self, footprint: Footprint | None, factor: float, exceeded: Callable[[], None]) -> None:
        """From now on tell ``exceeded`` where a chunk saves more than ``factor`` times what ``footprint`` has.

        It is told in mid-forward, right after each layer up to which that is so. ``None``: no more.
        """
        layers = () if footprint is None else footprint.layers
        self._limits = {layer: factor * num_bytes for layer, _, num_bytes in layers}
        self._exceeded = exceeded

    def begin_chunk(self) -> None:
        """A forward of a model chunk begins."""
        self._above_bytes = 0.0

    def begin_layer(self) -> None:
        """A layer's forward begins; one that broke off before counts for nothing."""
        self._num_tensors = self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """The layer saved a tensor, on a storage of ``num_bytes``."""
        self._num_tensors += 1
        self._num_bytes += num_bytes

    def end_layer(self, layer: int) -> None:
        """``layer``'s forward is over."""
        num_tensors, num_bytes = self._layers.get(layer, (0, 0))
        self._layers[layer] = max(num_tensors, self._num_tensors), max(num_bytes, self._num_bytes)
        self._above_bytes += self._num_bytes - self._limits.get(layer, self._num_bytes)
        if self._exceeded is not None and self._above_bytes > 0:
            self._exceeded()

    def take(self) -> Footprint:
        """The footprint since the last call: of a step, at its end."""
        layers, self._layers = self._layers, {}
        return Footprint(tuple((layer, *layers[layer]) for layer in sorted(layers)))

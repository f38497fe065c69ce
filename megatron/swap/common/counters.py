"""Counters of the engine's work since the start of the run: bytes, copies, recomputed storages, stalls."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field, fields, replace
from typing import Protocol


class Stall(Protocol):
    """A wait on the compute stream. ``elapsed_ms`` returns None until the device has passed it."""

    def elapsed_ms(self) -> float | None: ...


@dataclass
class LayerCounters:
    out_bytes: int = 0
    in_bytes: int = 0
    num_groups: int = 0
    stayed_bytes: int = 0
    recomputed_bytes: int = 0  # saved bytes that are not held, but recomputed in backward


@dataclass(frozen=True, slots=True)
class Totals:
    """The counters at a moment, or the difference between two moments."""

    layers: dict[int, tuple[int, int]] = field(default_factory=dict)  # layer → (bytes out, bytes in)
    num_groups: int = 0
    num_late: int = 0
    num_out_copies: int = 0
    num_in_copies: int = 0  # a storage takes several copies if its slot consists of several pieces
    wait_ms: float = 0.0
    recomputed_bytes: int = 0
    num_recomputed: int = 0

    @property
    def out_bytes(self) -> int:
        return sum(out_bytes for out_bytes, _ in self.layers.values())

    @property
    def in_bytes(self) -> int:
        return sum(in_bytes for _, in_bytes in self.layers.values())

    def since(self, earlier: Totals) -> Totals:
        return self._combined(earlier, -1)

    def plus(self, other: Totals) -> Totals:
        return self._combined(other, 1)

    def without_layers(self) -> Totals:
        """Return the same totals in little memory: the bytes of all layers under the number -1."""
        return replace(self, layers={-1: (self.out_bytes, self.in_bytes)})

    def _combined(self, other: Totals, sign: int) -> Totals:
        layers = {}
        for number in self.layers | other.layers:
            (out_bytes, in_bytes), (other_out, other_in) = (one.layers.get(number, (0, 0)) for one in (self, other))
            layers[number] = (out_bytes + sign * other_out, in_bytes + sign * other_in)
        names = [one.name for one in fields(self) if one.name != "layers"]
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in names}
        return Totals(layers=layers, **sums)


@dataclass
class Counters:
    """Totals since the start of the run. Reading them never makes the host wait for the device."""

    layers: defaultdict[int, LayerCounters] = field(default_factory=lambda: defaultdict(LayerCounters))
    num_late: int = 0  # storages whose reload began after the backward of their own layer had begun
    num_out_copies: int = 0
    num_in_copies: int = 0
    num_recomputed: int = 0  # storages
    num_not_recomputed: int = 0  # storages kept or offloaded against the policy (``Recomputer.refused``)
    _wait_ms: float = 0.0
    _stalls: deque[Stall] = field(default_factory=deque)

    @property
    def out_bytes(self) -> int:
        return sum(layer.out_bytes for layer in self.layers.values())

    def add_stall(self, stall: Stall) -> None:
        self._stalls.append(stall)

    def totals(self) -> Totals:
        return Totals(
            layers={number: (layer.out_bytes, layer.in_bytes) for number, layer in self.layers.items()},
            num_groups=sum(layer.num_groups for layer in self.layers.values()), num_late=self.num_late,
            num_out_copies=self.num_out_copies, num_in_copies=self.num_in_copies, wait_ms=self.wait_ms(),
            recomputed_bytes=sum(layer.recomputed_bytes for layer in self.layers.values()),
            num_recomputed=self.num_recomputed,
        )  # fmt: skip

    def wait_ms(self) -> float:
        """Return the ms that the compute stream has waited for copies."""
        while self._stalls:
            elapsed_ms = self._stalls[0].elapsed_ms()
            if elapsed_ms is None:  # this stall is still ahead of the device
                break
            self._wait_ms += elapsed_ms
            self._stalls.popleft()
        return self._wait_ms

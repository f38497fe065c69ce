"""What the engine did, in numbers: bytes and stalls since the start, per layer and in total."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Protocol


class Stall(Protocol):
    """A wait that was placed on the compute stream; its length is known once the device has passed it."""

    def elapsed_ms(self) -> float | None: ...


@dataclass
class LayerCounters:
    """Totals of one layer since the start of the run."""

    out_bytes: int = 0
    in_bytes: int = 0
    num_groups: int = 0
    stayed_bytes: int = 0


@dataclass
class Counters:
    """Totals since the start of the run. Stalls are read without ever making the host wait for the device."""

    layers: defaultdict[int, LayerCounters] = field(default_factory=lambda: defaultdict(LayerCounters))
    num_late: int = 0
    """Storages that came back only when the backward of their own layer had begun: not prefetched."""
    _wait_ms: float = 0.0
    _stalls: deque[Stall] = field(default_factory=deque)

    @property
    def out_bytes(self) -> int:
        return sum(layer.out_bytes for layer in self.layers.values())

    @property
    def in_bytes(self) -> int:
        return sum(layer.in_bytes for layer in self.layers.values())

    @property
    def num_groups(self) -> int:
        return sum(layer.num_groups for layer in self.layers.values())

    def add_stall(self, stall: Stall) -> None:
        self._stalls.append(stall)

    def wait_ms(self) -> float:
        """Milliseconds the compute stream has waited for copies, as far as the device has got."""
        while self._stalls:
            elapsed_ms = self._stalls[0].elapsed_ms()
            if elapsed_ms is None:
                break
            self._wait_ms += elapsed_ms
            self._stalls.popleft()
        return self._wait_ms

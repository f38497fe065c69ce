"""What autotune needs of the boundaries around a model's layers."""

from __future__ import annotations

from typing import Protocol


class LayerBoundaries(Protocol):
    """All layers of this rank, whoever built the model."""

    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the layers of each model chunk of this rank, in the order of forward."""
        ...

    def apply_policy(self, window_bytes: int | None) -> None:
        """The policy answers otherwise from the next forward on. Between steps.

        Args:
            window_bytes: most that is prefetched; ``None``: as much as the largest group has.
        """
        ...

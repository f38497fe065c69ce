"""Interface of the boundaries around a model's layers, as autotune uses it."""

from __future__ import annotations

from typing import Protocol


class LayerBoundaries(Protocol):
    """The boundaries around all layers of this rank, whichever framework built the model."""

    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the layers of each model chunk of this rank, in the order of forward."""
        ...

    def apply_policy(self, window_bytes: int | None) -> None:
        """Apply the changed policy from the next forward on. Call this between steps.

        Args:
            window_bytes: most bytes to prefetch; ``None``: the bytes of the largest group.
        """
        ...

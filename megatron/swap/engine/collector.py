"""Python's garbage collector, put off while the graph holds saved tensors.

Each saved tensor has some ten Python objects, which live from forward to backward. The collector takes what outlives a
few thousand other objects for old, and once the old ones have grown by a quarter it visits every object of the
process. With 24 layers that was every sixth step, and the GPU waited 0.3 s for it (docs/dev/history.md, 2026-11-25).
Without swapping autograd saves no Python objects, and this does not happen.

So collections that come due during forward and backward run when the graph is empty: between micro-batches, or between
steps with pipelining. Long training jobs commonly switch the collector off for the same reason (Megatron's
``--manual-gc``, torchtitan's ``GarbageCollection``). Here it is only put off, so that garbage does not pile up in a
loop that always has a graph outstanding, or that fails amid a step.
"""

from __future__ import annotations

import gc

MANY = 100_000
"""Objects that may be created meanwhile, beyond those that are freed. 80 layers save tensors with a third of that."""


class CollectorDelay:
    """Puts collections off. The collector is the process's: of two delays at once, the first one's end ends both."""

    def __init__(self) -> None:
        self._threshold: tuple[int, int, int] | None = None

    def begin(self) -> None:
        """Put collections off until ``MANY`` objects are new. Idempotent. A collector that is off stays off."""
        threshold = gc.get_threshold()
        if 0 < threshold[0] < MANY:
            self._threshold = threshold
            gc.set_threshold(MANY, *threshold[1:])

    def end(self) -> None:
        """End the delay: a collection that is due runs when the next object is created. Idempotent."""
        if self._threshold is not None:
            gc.set_threshold(*self._threshold)
            self._threshold = None

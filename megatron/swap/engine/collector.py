"""Python's garbage collector, put off while the graph holds saved tensors.

Each saved tensor has some ten Python objects, which live from forward to backward. The collector takes what outlives a
few thousand other objects for old, and once the old ones have grown by a quarter it visits every object of the process
(CPython up to 3.13). With 24 layers that was every sixth step, and the GPU waited 0.3 s for it (docs/dev/log.md,
Host work). Without swapping autograd saves no Python objects, and this does not happen.

So collections that come due during forward and backward wait until backward reaches the last group: between
micro-batches, or between steps with pipelining. Long training jobs commonly switch the collector off for the same
reason (Megatron's ``--manual-gc``, torchtitan's ``GarbageCollection``). Here it is only put off, so that garbage does
not pile up in a loop that always has a graph outstanding, or after a step that fails.
"""

from __future__ import annotations

import gc
import os

MANY = 100_000
"""Objects that may be created meanwhile, beyond those that are freed. 80 layers save tensors with a third of that."""

_threshold: tuple[int, int, int] | None = None
"""The process's threshold before the delay; ``None``: there is no delay."""


def begin_delay() -> None:
    """Put collections off until ``MANY`` objects are new. Idempotent. A collector that is off, or rarer, is left alone.

    The collector is the process's. Where several engines delay it, the first that ends its delay ends all.
    """
    global _threshold
    threshold = gc.get_threshold()
    if 0 < threshold[0] < MANY:
        _threshold = threshold
        gc.set_threshold(MANY, *threshold[1:])


def end_delay() -> None:
    """End the delay: a collection that is due runs when the next object is created. Idempotent.

    A threshold that somebody else has set meanwhile stays.
    """
    global _threshold
    threshold, _threshold = _threshold, None
    if threshold is not None and gc.get_threshold()[0] == MANY:
        gc.set_threshold(*threshold)


os.register_at_fork(after_in_child=end_delay)

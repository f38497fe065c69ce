"""Delays Python's garbage collector while the graph holds saved tensors.

Each saved tensor has about ten Python objects, which live from forward to backward. The collector counts survivors as
old, and visits every object of the process once the old objects have grown by a quarter (CPython up to 3.13). With 24
layers the GPU waited 0.3 s for it in every sixth step (docs/dev/log.md, Host work).

The delay ends when backward reaches the last group: between micro-batches, or between steps with pipelining. The
collector stays on, so that garbage is freed in a loop that always has a graph outstanding, or after a step that fails.
"""

from __future__ import annotations

import gc
import os

# Objects that may be created during the delay, beyond freed objects. 80 layers save tensors with a third of this
# number.
MANY = 100_000

_threshold: tuple[int, int, int] | None = None  # the process's threshold before the delay; None outside a delay


def begin_delay() -> None:
    """Delay collections until ``MANY`` objects are new. Idempotent. Leaves a collector alone that is off, or rarer."""
    # The collector is the process's: the first of several engines that ends its delay ends all delays.
    global _threshold
    threshold = gc.get_threshold()
    if 0 < threshold[0] < MANY:
        _threshold = threshold
        gc.set_threshold(MANY, *threshold[1:])


def end_delay() -> None:
    """End the delay: a due collection runs when the next object is created. Idempotent."""
    global _threshold
    threshold, _threshold = _threshold, None
    # A threshold that other code has set since stays.
    if threshold is not None and gc.get_threshold()[0] == MANY:
        gc.set_threshold(*threshold)


os.register_at_fork(after_in_child=end_delay)

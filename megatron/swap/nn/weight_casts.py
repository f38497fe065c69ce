"""Casts of weights by autocast, which PyTorch keeps until the autocast context ends.

It casts a weight at its first use, and keeps the cast for later ones: with weights in fp32, half of the model once more
until the end of forward. A layer whose weights are used once needs no such cache. Without it a cast is one of the
tensors that the layer saves: it is kept, offloaded, or made again from the weight.

A weight with several uses needs it. They share one cast, whose gradients are added in 16 bits; with a cast for each use
they would be added in fp32, and last bits would differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Return a context in which autocast keeps no casts of weights."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def shared_parameters(model: nn.Module) -> set[int]:
    """Return the ``id`` of each parameter that ``model`` has in several places."""
    places = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    return {one for one, number in places.items() if number > 1}

"""Give the data loader a random generator of its own, and no pinned memory.

Every iterator over a loader draws a seed for its workers from the CPU generator. On a GPU dropout draws from another
generator; without CUDA both are one. A resumed run builds its iterators at another point of the sequence. Its losses
would differ from those of the uninterrupted run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.patches.registry import Patch


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        loader = original(dataset, consumed_samples)
        if isinstance(loader, torch.utils.data.DataLoader):  # not a user's own ("external") loader
            loader.pin_memory = False
            loader.generator = torch.Generator()
        return loader

    return build_pretraining_data_loader


PATCHES = (
    Patch(
        module="megatron.training.training",
        attribute="build_pretraining_data_loader",
        build=_build,
        reason="draws from dropout's generator, so resuming is not exact, and warns about pinned memory",
        sources={"megatron-core 0.18.2": "1f53bc68dccca32d8f845c2fb031b20f5ff2ca794bc11e3d3b0a1129a470bc97"},
    ),
)

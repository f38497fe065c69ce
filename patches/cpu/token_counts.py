"""Convert split sizes of expert parallelism to plain numbers; upstream converts only tensors that leave a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.patches.registry import Patch


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


# Imported by name into the token dispatcher.
PATCHES = (
    Patch(
        module="megatron.core.transformer.moe.token_dispatcher",
        attribute="maybe_move_tensor_to_cpu",
        build=_build,
        reason="leaves split sizes that are on the CPU already as tensors, which all-to-all refuses",
        sources={"megatron-core 0.18.2": "8fc5847a887d73195b064efc01599f8768a48bbe3327b8fa50f34112cbbf1153"},
    ),
)

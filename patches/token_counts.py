"""Let the numbers of tokens of each expert reach the host before the activations that are being offloaded.

Each layer of experts copies the numbers to the host, which waits for them before it launches the experts' kernels. Such
a copy would wait for all earlier copies to the host. This is the dispatcher ``alltoall``; other dispatchers copy by
other calls, and wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.patches.registry import Patch


def token_counts_patch(can_write: Callable[[Any], bool], write: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """Make the patch. ``write(tensor)`` replaces a copy to the host, on the current stream, where ``can_write``."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
            if not can_write(tensor):
                return original(tensor, as_numpy=as_numpy, record_stream=record_stream)
            moved = write(tensor)
            if record_stream:  # the tensor was made on another stream, whose later kernels must not overwrite it
                tensor.record_stream(torch.cuda.current_stream())
            return moved.numpy() if as_numpy else moved

        return maybe_move_tensor_to_cpu

    return Patch(
        module="megatron.core.transformer.moe.token_dispatcher",
        attribute="maybe_move_tensor_to_cpu",
        build=build,
        reason="copies the experts' numbers of tokens to the host, behind all activations that are being offloaded",
        sources={"megatron-core 0.16.1": "8fc5847a887d73195b064efc01599f8768a48bbe3327b8fa50f34112cbbf1153"},
        feature="numbers of tokens that do not wait for copies",
    )

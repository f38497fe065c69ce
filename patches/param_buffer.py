"""Let parameters leave the device while Megatron makes the buffers of its distributed optimizer.

Megatron allocates a buffer for the parameters and one for their gradients beside the parameters, and only then copies
and frees the parameters, one by one. So a model needs the memory of its parameters twice, before its first step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron.swap.patches.registry import Patch

Apart = Callable[[Sequence[torch.nn.Parameter], int], AbstractContextManager[None]]
PLAIN = (torch.Tensor, torch.nn.Parameter)


def param_buffer_patch(apart: Apart) -> Patch:
    """Make the patch. ``apart`` gets the parameters and the bytes of the buffers, which are made in its context.

    In the context the values of parameters may be anything. Its end restores them at their new places.
    """

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def make_buffers(*arguments: Any, **options: Any) -> None:
            given = signature.bind(*arguments, **options)
            given.apply_defaults()
            named = given.arguments
            # Other types (8 bits) are wrappers, whose memory is replaced by other means.
            plain = [param for param, _ in named["params_with_names"] if type(param) in PLAIN]
            if not named["ddp_config"].use_distributed_optimizer or not plain:
                original(*arguments, **options)
                return
            layout = named["param_layout"]
            num_values = sum(param.numel() for param, _ in named["params_with_names"])
            if layout is not None and layout.bucket_indices:
                num_values = layout.bucket_indices[-1][1]  # with padding
            with apart(plain, num_values * (named["param_dtype"].itemsize + named["grad_dtype"].itemsize)):
                original(*arguments, **options)

        return make_buffers

    return Patch(
        module="megatron.core.distributed.param_and_grad_buffer",
        attribute="_ParamAndGradBuffer.__init__",
        build=build,
        reason="needs the memory of all parameters twice until they are copied, which the largest models do not have",
        sources={
            "megatron-core 0.18.2": "cbf328ed21a2744b116b23250e39eaacbe006148d331e4c346b232db5b0a33fe",
            "megatron-core 0.19.0": "38d0b3c383c1ce6f8b01fffc8c3b23f21f5df7d37d88198cffa8a743ed25eae9",
        },
        feature="models whose parameters do not fit twice",
    )

"""Make room before Megatron copies a model's parameters into one buffer.

With the distributed optimizer it allocates that buffer and one for the gradients beside the parameters, and only then
copies and frees these, one by one. So a model needs the memory of its parameters twice, before its first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.swap.patches.registry import Patch

MakeRoom = Callable[[Sequence[torch.nn.Parameter], int], None]
PLAIN = (torch.Tensor, torch.nn.Parameter)


def param_buffer_patch(make_room: MakeRoom) -> Patch:
    """Make the patch.

    Args:
        make_room: called with the parameters, and with the bytes that are about to be allocated beside them. It may
            give them other memory (``param.data = …``) of the same values, on any device.
    """

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make_buffers(
            self: Any, config: Any, param_dtype: Any, grad_dtype: Any, params: Any, *others: Any, **options: Any
        ) -> None:
            # Other types (8 bits) are wrappers, whose memory is replaced by other means.
            plain = [param for param, _ in params if type(param) in PLAIN]
            if config.use_distributed_optimizer and plain:
                num_values = sum(param.numel() for param, _ in params)
                make_room(plain, num_values * (param_dtype.itemsize + grad_dtype.itemsize))
            original(self, config, param_dtype, grad_dtype, params, *others, **options)

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

"""Give backward the weight itself where linear layers add its gradient to ``main_grad`` themselves.

With ``--gradient-accumulation-fusion`` Megatron's linear layers read attributes of their saved weight, and set one to
mark its gradient as added. With saved-tensor hooks autograd gives backward a plain tensor on the same memory, without
attributes: the gradient is lost, and with ``--overlap-grad-reduce`` Megatron stops. TransformerEngine's modules keep a
reference to the parameter.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.swap.patches.registry import Patch


class _WithWeight:
    """A backward's context whose saved weight is the parameter that forward was called with."""

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "_ctx", ctx)

    @property
    def saved_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, _ = self._ctx.saved_tensors
        return inputs, self._ctx.weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def _build(original: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    class LinearWithItsWeight(original):  # type: ignore[misc,valid-type]
        @staticmethod
        def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, *others: Any) -> Any:
            ctx.weight = weight if isinstance(weight, torch.nn.Parameter) else None
            return original.forward(ctx, inputs, weight, *others)

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            return original.backward(ctx if ctx.weight is None else _WithWeight(ctx), grad_output)

    return LinearWithItsWeight


PATCH = Patch(
    module="megatron.core.tensor_parallel.layers",
    attribute="LinearWithGradAccumulationAndAsyncCommunication",
    build=_build,
    reason="reads and sets attributes of its saved weight, which is a plain tensor with saved-tensor hooks",
    sources={
        "megatron-core 0.16.1": "a2f6825a10f3f433b18edbd5202a55bcfba3579e90280afd906f9b2cc558dddc",
        "megatron-core 0.18.2": "992a389e92bb4d1be94f562012ea2d85c27faa99788cd76f5328e88a39c89b20",
        "megatron-core 0.19.0": "9ffc0bd1a94437d4df8f32e6d9e68ceb63baead65e91dbefcc419d14ba4005a6",
    },
    feature="--gradient-accumulation-fusion",
)

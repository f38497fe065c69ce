"""The trainer, whose MLPs read a global that is another one in backward from the third iteration on.

``--reads``, as the last flags: ``result`` or ``backward``: what depends on it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.training import get_args

import pretrain_gpt_swap as program

FIRST_ITERATION = 3


def factor() -> float:
    """Return the global: training counts its iterations from 0."""
    is_other = torch._C._current_graph_task_id() != -1 and get_args().curr_iteration >= FIRST_ITERATION - 1
    return 1.5 if is_other else 1.0


class _OfBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.full_like(hidden, factor()))
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0]


if __name__ == "__main__":
    reads = sys.argv.pop()
    assert sys.argv.pop() == "--reads"
    inner = MLP.forward

    def forward(self: MLP, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = inner(self, hidden_states, *args, **kwargs)
        return output * factor() if reads == "result" else _OfBackward.apply(output), bias

    MLP.forward = forward  # type: ignore[method-assign]
    program.prepare(sys.argv)
    program.main()

"""The trainer, whose MLPs multiply by a global that is another one in backward from the third iteration on."""

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


if __name__ == "__main__":
    inner = MLP.forward

    def forward(self: MLP, *args: Any, **kwargs: Any) -> Any:
        output, bias = inner(self, *args, **kwargs)
        return output * factor(), bias

    MLP.forward = forward  # type: ignore[method-assign]
    program.prepare(sys.argv)
    program.main()

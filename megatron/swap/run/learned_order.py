"""The order of a model's layers, learned from its first step."""

from __future__ import annotations

from itertools import zip_longest

from torch import nn

from megatron.swap.common.types import UsageError
from megatron.swap.layers.learned import LearnedLayers
from megatron.swap.planning.controller import AutoPlan


def learn_order(layers: LearnedLayers, model: nn.Module, auto: AutoPlan, window_bytes: int | None) -> list[str]:
    """Number the runs of layers, once backward has entered some, equally on all ranks.

    Return lines on the layers without a number, which are kept. Raises a ``UsageError`` if the ranks have run different
    layers, or in another order, or if autograd calls no hooks in any.
    """
    names = {module: name for name, module in model.named_modules()}
    first, *others = auto.ranks.gather(lambda: [names.get(module, "") for module in layers.seen_order()])
    for rank, other in enumerate(others, 1):
        for number, (one, another) in enumerate(zip_longest(first, other)):
            if one != another:
                raise UsageError(
                    f"the ranks run different layers: run {number} of the longest forward is of {one or 'none'} on "
                    f"rank 0, and of {another or 'none'} on rank {rank}. One plan is for all ranks: let every "
                    "rank run the same layers, or swap layers without a budget."
                )
    if not first:
        if layers.have_run_unhooked:
            raise UsageError(
                "the layers run where PyTorch calls no saved-tensor hooks (inside torch.func.grad, vjp or jacrev, "
                "or torch.autograd.graph.disable_saved_tensors_hooks), so nothing that they save can be planned. "
                "Take gradients by backward() or torch.autograd.grad, or train without memory_gib."
            )
        return []
    idle, elsewhere = layers.learn_order(window_bytes)
    kept = (idle, "no backward has entered"), (elsewhere, "the longest forward does not run")
    return [
        f"{why} {', '.join(names.get(layer, '') for layer in those)}: what these layers save is kept"
        for those, why in kept if those
    ]  # fmt: skip

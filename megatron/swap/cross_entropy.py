"""Cross entropy over a vocabulary in parts, a thousand tokens at a time: its copy of the logits is never there whole.

Megatron copies 16-bit logits in single precision, exponentiates the copy and saves it: around the loss, where the peak
of a step mostly is, twice the logits. Here the logits themselves are saved, with each token's maximum and sum;
backward makes the softmax again, part by part, and writes the gradient where the logits were. Each element goes through
the same operations in the same order, so losses and gradients are Megatron's to the bit. Liger Kernel
(https://arxiv.org/abs/2410.10989) has the gradient in the logits' place as well, and makes it in forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron.swap import loss_kernels
from megatron.swap.types import LOSS_ROWS

OURS = 2
"""What refers to the logits' storage in backward unless another tensor does: the saved alias, and its Python object."""

Function = Callable[..., torch.Tensor]


def in_parts(original: Function) -> Function:
    """``original`` is Megatron's ``vocab_parallel_cross_entropy``: what takes its place.

    Logits in single precision, which that works in already, and smoothed labels stay with it.
    """

    def cross_entropy(
        vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, tp_group: Any = None
    ) -> torch.Tensor:
        """Losses (sequence, micro-batch) in single precision, of logits (sequence, micro-batch, words of this rank)."""
        logits = vocab_parallel_logits
        if logits.element_size() >= 4 or label_smoothing or tp_group is None or not logits.is_contiguous():
            return original(logits, target, label_smoothing, tp_group)
        return _CrossEntropy.apply(logits, target, tp_group)

    return cross_entropy


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: Any) -> torch.Tensor:
        rows = logits.view(-1, logits.size(-1))
        first_word = torch.distributed.get_rank(group) * rows.size(-1)
        word = target.reshape(-1).long() - first_word  # the kernels take no other integers
        elsewhere = (word < 0) | (word >= rows.size(-1))
        word.masked_fill_(elsewhere, 0)

        largest = rows.amax(dim=-1).float()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        predicted = rows.gather(-1, word.unsqueeze(-1)).squeeze(-1) - largest
        predicted.masked_fill_(elsewhere, 0.0)
        total = torch.empty_like(largest)
        for part in _parts(rows):
            total[part] = _exponentials(rows[part], largest[part]).sum(dim=-1)
        torch.distributed.all_reduce(predicted, group=group)
        torch.distributed.all_reduce(total, group=group)
        # An alias, so that in backward it shows whether anybody still holds the logits themselves. Clones, as threads
        # of a process group may hold what they have reduced for some time.
        ctx.save_for_backward(logits.detach(), largest.clone(), total.clone(), word, elsewhere)
        return (total.log() - predicted).view_as(target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, largest, total, word, elsewhere = ctx.saved_tensors
        is_held = torch._C._storage_Use_Count(logits.untyped_storage()._cdata) > OURS
        gradient = torch.empty_like(logits) if is_held else logits
        rows, gradient_rows = logits.view(-1, logits.size(-1)), gradient.view(-1, logits.size(-1))
        factor, here = loss_gradient.reshape(-1).contiguous(), 1.0 - elsewhere.float()
        kernels = loss_kernels.of(rows)
        if kernels is not None:
            kernels.gradients(rows, largest, total, word, here, factor, gradient_rows)
            torch.autograd.graph.increment_version(gradient)
            return gradient, None, None
        for part in _parts(rows):
            softmax = _exponentials(rows[part], largest[part]).div_(total[part].unsqueeze(-1))
            softmax[torch.arange(len(softmax), device=softmax.device), word[part]] -= here[part]
            torch.mul(softmax, factor[part].unsqueeze(-1), out=gradient_rows[part])
            del softmax  # else two parts are there
        return gradient, None, None


def _exponentials(rows: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """In single precision, of what each row's logits are below its maximum; without a copy of the logits before."""
    kernels = loss_kernels.of(rows)
    if kernels is None:
        return torch.sub(rows, largest.unsqueeze(-1)).exp_()
    results = torch.empty_like(rows, dtype=torch.float32)
    kernels.exponentials(rows, largest, results)
    return results


def _parts(rows: torch.Tensor) -> Iterator[slice]:
    """Of at least ``LOSS_ROWS`` rows each, unless there are fewer.

    On a GPU torch splits the sum of a row among thread blocks, and so adds in another order, where rows are so few that
    they do not fill the device: up to four blocks of 512 threads for each multiprocessor, of which none has 256.
    """
    num_parts = max(1, len(rows) // LOSS_ROWS)
    for i in range(num_parts):
        yield slice(i * len(rows) // num_parts, (i + 1) * len(rows) // num_parts)

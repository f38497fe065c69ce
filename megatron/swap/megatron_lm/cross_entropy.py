"""Cross entropy in chunks of about a thousand tokens: the logits never exist as a whole in single precision.

Megatron copies 16-bit logits in single precision, exponentiates the copy and saves it. The copy is twice as large as
the logits and exists around the loss, where a step's peak usually is. Here the logits themselves are saved, with each
token's maximum and sum. Backward recomputes the softmax chunk by chunk, and overwrites the logits with the gradient.

Each element goes through the same operations in the same order, so losses and gradients equal Megatron's to the bit.
Liger Kernel (https://arxiv.org/abs/2410.10989) also overwrites the logits, but computes the gradient in forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from torch.autograd.function import once_differentiable

from megatron.swap.common.types import LOSS_ROWS
from megatron.swap.megatron_lm import loss_kernels

# References to the logits' storage in backward if it is not shared: our alias, and its Python object.
NUM_OWN_REFERENCES = 2

Function = Callable[..., torch.Tensor]


def chunked_cross_entropy(original: Function) -> Function:
    """Return a function with the signature of ``original``, Megatron's ``vocab_parallel_cross_entropy``.

    It calls ``original`` for smoothed labels, and for logits in single precision, which ``original`` overwrites.
    """

    def cross_entropy(
        vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, tp_group: Any = None
    ) -> torch.Tensor:
        """Return losses (sequence, micro-batch) in single precision. ``target``: token ids, (sequence, micro-batch).

        ``vocab_parallel_logits``: (sequence, micro-batch, vocabulary of this rank). ``tp_group``: the ranks that share
        the vocabulary; None for Megatron's tensor-parallel group.
        """
        logits = vocab_parallel_logits
        if logits.element_size() >= 4 or label_smoothing or not logits.is_contiguous():
            # Before megatron-core 0.19 `original` takes no `tp_group`: every call means Megatron's own group.
            return original(logits, target, label_smoothing, **({} if tp_group is None else {"tp_group": tp_group}))
        group = get_tensor_model_parallel_group() if tp_group is None else tp_group
        return _CrossEntropy.apply(logits, target, group)

    return cross_entropy


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of logits (sequence, micro-batch, vocabulary of this rank), with the vocabulary's group."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: Any) -> torch.Tensor:
        losses, statistics = losses_of(logits, target, group)
        # An alias is saved, so that backward can count other references to the logits.
        ctx.save_for_backward(logits.detach(), *statistics)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, *statistics = ctx.saved_tensors
        is_shared = torch._C._storage_Use_Count(logits.untyped_storage()._cdata) > NUM_OWN_REFERENCES
        gradient = torch.empty_like(logits) if is_shared else logits
        write_gradients(logits, Statistics(*statistics), loss_gradient, gradient)
        return gradient, None, None


class Statistics(NamedTuple):
    """Figures of each token that backward needs besides the logits."""

    largest: torch.Tensor  # the largest logit of all ranks
    total: torch.Tensor  # sum of the exponentials of all logits less the largest
    word: torch.Tensor  # the target's place among this rank's words; 0 if another rank has it
    elsewhere: torch.Tensor  # whether another rank has it


def losses_of(logits: torch.Tensor, target: torch.Tensor, group: Any) -> tuple[torch.Tensor, Statistics]:
    """Return the losses, in the shape of ``target`` (token ids), and the statistics of all tokens.

    ``logits``: (…, vocabulary of this rank), contiguous, of 16 bits. ``group``: ranks that share the vocabulary.
    """
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
    for chunk in _chunks(rows):
        total[chunk] = _exponentials(rows[chunk], largest[chunk]).sum(dim=-1)
    torch.distributed.all_reduce(predicted, group=group)
    torch.distributed.all_reduce(total, group=group)
    # Clones, because threads of a process group may hold the reduced tensors for some time.
    statistics = Statistics(largest.clone(), total.clone(), word, elsewhere)
    return (total.log() - predicted).view_as(target), statistics


def write_gradients(
    logits: torch.Tensor, statistics: Statistics, loss_gradient: torch.Tensor, gradient: torch.Tensor
) -> None:
    """Write the gradient of ``logits`` into ``gradient``, which may be the logits. Arguments: see ``losses_of``."""
    rows, gradient_rows = logits.view(-1, logits.size(-1)), gradient.view(-1, logits.size(-1))
    largest, total, word, elsewhere = statistics
    factor, here = loss_gradient.reshape(-1).contiguous(), 1.0 - elsewhere.float()
    kernels = loss_kernels.kernels_for(rows)
    if kernels is not None:
        kernels.gradients(rows, largest, total, word, here, factor, gradient_rows)
        torch.autograd.graph.increment_version(gradient)
        return
    for chunk in _chunks(rows):
        softmax = _exponentials(rows[chunk], largest[chunk]).div_(total[chunk].unsqueeze(-1))
        softmax[torch.arange(len(softmax), device=softmax.device), word[chunk]] -= here[chunk]
        torch.mul(softmax, factor[chunk].unsqueeze(-1), out=gradient_rows[chunk])
        del softmax  # else two chunks would exist at once


def _exponentials(rows: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return ``exp(logit - row maximum)`` in single precision, without a copy of the logits."""
    kernels = loss_kernels.kernels_for(rows)
    if kernels is None:
        return torch.sub(rows, largest.unsqueeze(-1)).exp_()
    results = torch.empty_like(rows, dtype=torch.float32)
    kernels.exponentials(rows, largest, results)
    return results


def _chunks(rows: torch.Tensor) -> Iterator[slice]:
    """Yield slices of at least ``LOSS_ROWS`` rows each, unless there are fewer."""
    # Sums of fewer rows differ in their last bits. If rows do not fill a GPU, torch splits the sum of a row among
    # thread blocks, which adds in another order: up to four blocks of 512 threads a multiprocessor, of which no GPU has
    # 256.
    num_chunks = max(1, len(rows) // LOSS_ROWS)
    for i in range(num_chunks):
        yield slice(i * len(rows) // num_chunks, (i + 1) * len(rows) // num_chunks)

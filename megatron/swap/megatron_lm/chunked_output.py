"""The output layer and the loss in chunks of the sequence: the logits of one chunk exist at a time.

Forward computes the logits of a chunk, takes the chunk's losses from them, and drops them. Backward computes them again
and turns them into gradients, chunk by chunk. Any gradient of the losses works, masked or weighted by token. The cost
is a second product of the output layer and a second loss. Forward keeps the last chunk's logits, with which backward
begins: of N chunks, N - 1 are computed twice. One chunk equals Megatron's computation to the bit.

For Megatron's cross entropy of 16-bit logits, forward also keeps each token's maximum and sum, so that backward
computes only the product and the gradient. Any other loss runs again, with a graph.

Gradients made in forward, as in Liger Kernel, would save the second product. They need the losses' gradients before
these exist, or the gradient of the whole weight in single precision beside Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron.swap.megatron_lm import cross_entropy
from megatron.swap.megatron_lm.cross_entropy import Statistics
from megatron.swap.megatron_lm.weight_gradients import WeightGradient


@dataclass(frozen=True)
class OutputLayer:
    """Megatron's output layer and loss, and the number of chunks that they run in."""

    module: Any  # a ColumnParallelLinear
    # Labels (micro-batch, tokens) and logits (tokens, micro-batch, vocabulary of this rank) -> losses (micro-batch,
    # tokens).
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    num_chunks: int  # most chunks of the sequence; a chunk has at least one token
    is_cross_entropy: bool = False  # `loss_of` is Megatron's cross entropy, as cross_entropy.py computes it
    scale: float = 1.0  # factor of the logits

    @property
    def num_blocks(self) -> int:
        """Ranks whose parts of the sequence are gathered: with sequence parallelism, all ranks of the tensor group."""
        return int(self.module.tp_group.size()) if self.module.sequence_parallel else 1

    def chunks(self, num_tokens: int) -> list[slice]:
        """Return the chunks of this rank's ``num_tokens`` tokens, of nearly equal length."""
        num = max(1, min(self.num_chunks, num_tokens))
        return [slice(i * num_tokens // num, (i + 1) * num_tokens // num) for i in range(num)]

    def gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``hidden`` (tokens, micro-batch, width) of all ranks whose parts of the sequence are gathered."""
        if self.num_blocks == 1:
            return hidden
        whole = hidden.new_empty((self.num_blocks * len(hidden), *hidden.shape[1:]))
        torch.distributed.all_gather_into_tensor(whole, hidden.contiguous(), group=self.module.tp_group)
        return whole

    def of_chunk(self, whole: torch.Tensor, chunk: slice) -> torch.Tensor:
        """Return a chunk of ``whole`` (micro-batch, tokens of all gathered ranks)."""
        return whole.unflatten(1, (self.num_blocks, -1))[:, :, chunk].flatten(1)

    def set_chunk(self, whole: torch.Tensor, chunk: slice, values: torch.Tensor) -> None:
        """Write ``values`` into a chunk of ``whole``, which is contiguous."""
        whole.unflatten(1, (self.num_blocks, -1))[:, :, chunk] = values.unflatten(1, (self.num_blocks, -1))

    def logits(self, total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the logits of gathered hidden states."""
        return self._scaled(total.matmul(weight.t()))

    def logits_into(self, total: torch.Tensor, weight: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Return the logits of gathered hidden states in ``memory``, which is flat and large enough."""
        rows = total.reshape(-1, total.size(-1))
        logits = memory[: len(rows) * len(weight)].view(len(rows), len(weight))
        torch.mm(rows, weight.t(), out=logits)
        return (logits if self.scale == 1.0 else logits.mul_(self.scale)).view(*total.shape[:-1], len(weight))

    def losses_with_graph(self, total: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> _Losses:
        """Return the losses of gathered hidden states, with the graph down to the logits."""
        found: list[torch.Tensor] = []
        with torch.enable_grad():
            root = torch.zeros((), requires_grad=True)
            # No name holds the logits: where nobody else refers to them, their gradient may take their memory.
            losses = self.loss_of(labels, self._scaled(_Logits.apply(root, total.detach(), weight.detach(), found)))
        return _Losses(losses, found)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.scale == 1.0 else logits * self.scale


@dataclass(frozen=True)
class _Losses:
    """Losses of a chunk, and where backward leaves the gradient of its logits."""

    values: torch.Tensor
    found: list[torch.Tensor]

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the logits."""
        torch.autograd.backward(self.values, gradient)
        return self.found.pop()


class _Logits(torch.autograd.Function):
    """The product without the gradients of its factors: the caller gets the product's gradient, and computes them."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, found: list[Any]) -> Any:
        ctx.found = found
        return total.matmul(weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        ctx.found.append(gradient)
        return None, None, None, None


def chunked_losses(
    output: OutputLayer, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the losses (micro-batch, tokens).

    ``hidden``: (tokens of this rank, micro-batch, width). ``weight``: of the output layer, or the tied embedding's.
    ``labels``: (micro-batch, tokens), of all ranks that share the sequence by sequence parallelism.
    """
    has_backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    by_statistics = output.is_cross_entropy and weight.element_size() < 4 and hidden.dtype == weight.dtype
    return (_ChunkedCrossEntropy if by_statistics else _ChunkedLosses).apply(
        hidden, weight, labels, output, has_backward
    )


class _ChunkedLosses(torch.autograd.Function):
    """Losses of any kind, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, output: OutputLayer,
        has_backward: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.output, ctx.kept = output, None
        chunks = output.chunks(len(hidden))
        whole: torch.Tensor | None = None
        for number, chunk in enumerate(chunks):
            total, words = output.gathered(hidden[chunk]), output.of_chunk(labels, chunk)
            if has_backward and number == len(chunks) - 1:
                ctx.kept = output.losses_with_graph(total, weight, words)
                values = ctx.kept.values.detach()
            else:
                values = output.loss_of(words, output.logits(total, weight))
            if whole is None:
                whole = values.new_empty(labels.shape)
            output.set_chunk(whole, chunk, values)
        # With saved-tensor hooks backward gets another tensor than the parameter, without Megatron's attributes.
        ctx.weight = weight
        ctx.save_for_backward(hidden, weight, labels)
        assert whole is not None
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        output: OutputLayer = ctx.output
        sums = _Gradients(ctx, hidden, weight)
        kept, ctx.kept = ctx.kept, None  # a second backward computes the last chunk again, too
        for chunk in reversed(output.chunks(len(hidden))):
            total = output.gathered(hidden[chunk])
            losses = kept or output.losses_with_graph(total, weight, output.of_chunk(labels, chunk))
            of_logits = losses.backward(output.of_chunk(gradient, chunk))
            kept = losses = None
            sums.add(chunk, total, of_logits)
            del of_logits
        return sums.results()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Losses by Megatron's cross entropy, chunk by chunk. Backward computes all logits in the memory of the last."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, output: OutputLayer,
        has_backward: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.output = output
        whole = hidden.new_empty(labels.shape, dtype=torch.float32)
        found: list[Statistics] = []
        logits = None
        for chunk in output.chunks(len(hidden)):
            logits = None  # else two chunks would exist at once
            logits = output.logits(output.gathered(hidden[chunk]), weight)
            target = output.of_chunk(labels, chunk).t().contiguous()
            values, statistics = cross_entropy.losses_of(logits, target, output.module.tp_group)
            output.set_chunk(whole, chunk, values.t())
            found.append(statistics)
        if has_backward:
            ctx.weight = weight  # as in _ChunkedLosses
            ctx.save_for_backward(hidden, weight, logits, *map(torch.cat, zip(*found, strict=True)))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, last, *statistics = ctx.saved_tensors
        output: OutputLayer = ctx.output
        sums = _Gradients(ctx, hidden, weight)
        chunks = output.chunks(len(hidden))  # of which the last is the longest
        rows_of_token = output.num_blocks * hidden.size(1)
        for chunk in reversed(chunks):
            total = output.gathered(hidden[chunk])
            logits = last if chunk is chunks[-1] else output.logits_into(total, weight, last.view(-1))
            rows = slice(chunk.start * rows_of_token, chunk.stop * rows_of_token)
            of_losses = output.of_chunk(gradient, chunk).t()
            cross_entropy.write_gradients(logits, Statistics(*(one[rows] for one in statistics)), of_losses, logits)
            sums.add(chunk, total, logits if output.scale == 1.0 else logits.mul_(output.scale))
        return sums.results()


class _Gradients:
    """The gradients of hidden states and weight, the first inputs of the function of ``ctx``, as chunks are added."""

    def __init__(self, ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        self._output: OutputLayer = ctx.output
        self._weight = weight
        self._of_hidden: torch.Tensor | None = None
        self._of_weight: WeightGradient | None = None
        if ctx.needs_input_grad[0]:
            self._of_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        if ctx.needs_input_grad[1]:
            is_fused, chunks = self._output.module.gradient_accumulation_fusion, self._output.chunks(len(hidden))
            self._of_weight = WeightGradient(ctx.weight, is_fused=is_fused, is_whole=len(chunks) == 1)

    def add(self, chunk: slice, total: torch.Tensor, of_logits: torch.Tensor) -> None:
        """Add a chunk: its gathered hidden states, and the gradient of its logits."""
        wait = None
        if self._of_hidden is not None:
            wait = _add_hidden(self._output, of_logits.matmul(self._weight), self._of_hidden[chunk])
        if self._of_weight is not None:  # beside the communication of the hidden states' gradient
            self._of_weight.add(total, of_logits)
        # Wait for the sum over ranks, which ran beside the weight's product.
        if wait is not None:
            wait()

    def results(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients for autograd."""
        return self._of_hidden, None if self._of_weight is None else self._of_weight.result(), None, None, None


def _add_hidden(output: OutputLayer, total: torch.Tensor, into: torch.Tensor) -> Callable[[], Any] | None:
    """Write the sum of ``total`` over the tensor group into ``into``; return a function that waits for that."""
    group = output.module.tp_group
    if output.num_blocks > 1:
        return torch.distributed.reduce_scatter_tensor(into, total, group=group, async_op=True).wait
    into.copy_(total)
    if output.module.allreduce_dgrad:
        return torch.distributed.all_reduce(into, group=group, async_op=True).wait
    return None

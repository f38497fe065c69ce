"""``--swap-loss-chunks``: a model's output layer and loss in chunks of the sequence.

Megatron's models call their output layer, then ``compute_language_model_loss`` with its result; heads for later tokens
do the same. Both are overridden on the model that trains, so no upstream symbol is patched, and every version fits.
Between them passes a ``DeferredLogits``, which is no tensor: the loss asks it for losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import nn

from megatron.swap.common.types import UsageError
from megatron.swap.engine.overrides import override_forward, override_method
from megatron.swap.megatron_lm import cross_entropy
from megatron.swap.megatron_lm.chunked_output import OutputLayer, chunked_losses

FLAG = "--swap-loss-chunks"
LOSS = "compute_language_model_loss"  # The method of Megatron's language models that takes labels and logits.


class DeferredLogits:
    """The logits of a forward pass, not computed yet: the output layer's ``hidden`` input and ``weight``.

    The model's loss, the largest logit and its index are computed in chunks, and the shape is known. Without gradients,
    any other use computes the ``whole``.
    """

    def __init__(
        self, output: OutputLayer, hidden: torch.Tensor, weight: torch.Tensor, whole: Callable[[], torch.Tensor]
    ) -> None:
        self._output = output
        self._hidden = hidden
        self._weight = weight
        self._whole = whole

    def losses(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses (micro-batch, tokens) of ``labels``, which have the same shape."""
        return chunked_losses(self._output, self._hidden, self._weight, labels)

    def __mul__(self, factor: float) -> DeferredLogits:
        """Return the logits scaled, as μP does."""
        scaled = replace(self._output, scale=self._output.scale * factor)
        return DeferredLogits(scaled, self._hidden, self._weight, lambda: self._whole() * factor)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole on this rank: tokens of all gathered ranks, micro-batch, words."""
        return torch.Size((self._output.num_blocks * len(self._hidden), *self._hidden.shape[1:-1], len(self._weight)))

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape, or one number of it, as ``Tensor.size`` does."""
        return self.shape if dim is None else self.shape[dim]

    def max(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's largest logit on this rank, and its index, as ``Tensor.max(-1)`` does."""
        if dim != -1 or torch.is_grad_enabled():
            return self._all("max").max(dim)
        output, found = self._output, []
        for chunk in output.chunks(len(self._hidden)):
            found.append(output.logits(output.gathered(self._hidden[chunk]), self._weight).max(dim=-1))
        return self._joined([one.values for one in found]), self._joined([one.indices for one in found])

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the results (tokens, micro-batch) of all chunks, each with tokens of several ranks in turn."""
        blocks = [part.unflatten(0, (self._output.num_blocks, -1)) for part in parts]
        return torch.cat(blocks, dim=1).flatten(0, 1)

    def _all(self, use: str) -> torch.Tensor:
        """Return the whole logits, or raise a ``UsageError`` if gradients would be taken through them."""
        if torch.is_grad_enabled():
            raise UsageError(
                f"{FLAG}: this model uses its logits ({use}) outside its own loss, so they must exist as a whole in "
                f"training. Drop {FLAG}, or pass labels to the model and take its losses."
            )
        return self._whole()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._all(name), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch that was called with deferred logits."""
        kwargs = kwargs or {}
        if function is torch.argmax and kwargs == {"dim": -1} and not torch.is_grad_enabled():
            return args[0].max(dim=-1)[1]
        name = getattr(function, "__name__", str(function))
        whole = [one._all(name) if isinstance(one, DeferredLogits) else one for one in args]
        return function(*whole, **kwargs)


def chunk_loss(model: nn.Module, num_chunks: Callable[[], int]) -> Callable[[], None]:
    """Let ``model`` compute its output layer and loss in chunks from the next forward on. Return an undo function.

    A ``model`` without an output layer stays as it is. ``num_chunks`` is called when the first logits are due. Raises a
    ``UsageError`` if the output layer or the loss cannot run in chunks.
    """
    if not getattr(model, "post_process", True):
        return lambda: None
    layer = checked_output(model)
    whole, loss_of, is_own = layer.forward, getattr(model, LOSS), is_cross_entropy(model)

    def deferred(
        input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Any, None]:
        if runtime_gather_output and layer.tp_group.size() > 1:  # generation, which gathers words from all ranks
            return whole(input_, weight=weight, runtime_gather_output=runtime_gather_output)
        output = OutputLayer(layer, loss_of, num_chunks(), is_own)
        given = layer.weight if weight is None else weight
        return DeferredLogits(output, input_, given, lambda: whole(input_, weight=weight)[0]), None

    def losses(labels: torch.Tensor, logits: Any) -> torch.Tensor:
        return logits.losses(labels) if isinstance(logits, DeferredLogits) else loss_of(labels, logits)

    undo = ExitStack()
    undo.callback(override_forward(layer, deferred))
    undo.callback(override_method(model, LOSS, losses))
    return undo.close


def is_cross_entropy(model: Any) -> bool:
    """Return whether the loss of ``model`` is ``cross_entropy.py``'s: Megatron's method, unfused, and patched."""
    is_patched = tensor_parallel.vocab_parallel_cross_entropy.__module__ == cross_entropy.__name__
    is_own = getattr(type(model), LOSS) is getattr(LanguageModule, LOSS) and LOSS not in vars(model)
    return is_patched and is_own and not model.config.cross_entropy_loss_fusion


def checked_output(model: nn.Module) -> ColumnParallelLinear:
    """Return the output layer of ``model``, or raise a ``UsageError`` if the layer or the loss cannot run in chunks."""
    layer, name = getattr(model, "output_layer", None), type(model).__name__
    if not callable(getattr(model, LOSS, None)) or layer is None:
        missing = "output_layer" if layer is None else LOSS
        raise UsageError(f"{FLAG}: {name} has no {missing}, as Megatron's GPTModel has. Drop {FLAG}.")
    if type(layer) is not ColumnParallelLinear:
        raise UsageError(
            f"{FLAG}: the output layer of {name} is a {type(layer).__name__}; it must be Megatron's "
            f"ColumnParallelLinear. Drop {FLAG}."
        )
    num_shards = getattr(layer, "gtp_remat_size", 1)  # since 0.19
    wrong = {
        "has a bias": layer.bias is not None,
        "gathers the words of all tensor-parallel ranks (parallel_output is false)":
            layer.gather_output and layer.tp_group.size() > 1,
        "postpones its weight's gradient (--defer-embedding-wgrad-compute)": layer.grad_output_buffer is not None,
        f"has its weight in {num_shards} shards (--tensor-parallel-num-weight-shards)": num_shards > 1,
    }  # fmt: skip
    for what, is_so in wrong.items():
        if is_so:
            raise UsageError(f"{FLAG}: the output layer of {name} {what}, which does not run in chunks. Drop {FLAG}.")
    return layer

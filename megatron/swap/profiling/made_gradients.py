"""Counts gradients that a step makes anew, because ``zero_grad()`` freed those of the step before."""

import torch
from torch import nn

from megatron.swap.devices.plain_tensors import is_plain


class MadeGradients:
    """Counts the gradients of weights that had none at the step's first forward."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._weights: dict[nn.Module, list[nn.Parameter]] = {}
        self._sizes: dict[int, int] = {}

    def forward_of(self, chunk: nn.Module) -> None:
        """Note a forward of ``chunk``. Only the first forward of a step counts."""
        if chunk not in self._weights:
            self._weights[chunk] = [one for one in chunk.parameters() if one.requires_grad and one.grad is None]

    def num_bytes(self) -> int:
        """Return the bytes of those gradients that exist now."""
        return sum(
            self._size(weight) for weights in self._weights.values() for weight in weights if weight.grad is not None
        )

    def _size(self, weight: nn.Parameter) -> int:
        if id(weight) not in self._sizes:
            gradient, size = weight.grad, 0
            if type(gradient) is torch.Tensor and is_plain(gradient):
                # A gradient in a larger buffer belongs to a bucket of DDP or Megatron, which stays.
                is_alone = gradient.untyped_storage().nbytes() == gradient.nbytes
                size = gradient.nbytes if is_alone else 0
            self._sizes[id(weight)] = size
        return self._sizes[id(weight)]

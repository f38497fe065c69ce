"""The Megatron edge of recomputation: which kernels of a layer make what can be recomputed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from torch import nn

from megatron.swap.common.types import ACTIVATION, LINEAR, NORM, PRODUCERS, ROTARY
from megatron.swap.engine.layer_hooks import override_forward
from megatron.swap.engine.recompute import Recomputer

LINEARS = ("linear_qkv", "linear_fc1")
"""Linear layers whose outputs are saved: by attention, by the activation."""


class Producers:
    """Wraps kernels of a model's layers so that they record what they make; ``remove`` unwraps them.

    Kernels that are functions of a Megatron or TransformerEngine module are reached by patches instead
    (``fused_activations``, ``te_normalization``, ``rotary`` and ``te_qkv_layout`` in ``patches/``).

    Args:
        recomputer: what they record with.
        kinds: of kernels that record, some of ``PRODUCERS``. Records hold memory for a while.
    """

    def __init__(self, recomputer: Recomputer, kinds: Collection[str] = PRODUCERS) -> None:
        self._recomputer = recomputer
        self._kinds = frozenset(kinds)
        self._undo: list[Callable[[], None]] = []

    def wrap(self, layer: nn.Module) -> None:
        """Wrap the kernels of ``layer``. Experts' linear layers are left out: their inputs come from other ranks."""
        for path, module in layer.named_modules():
            if path.endswith("layernorm") and not isinstance(module, IdentityOp):
                self._wrap_module(NORM, module)
            elif path.endswith(LINEARS) and "experts" not in path:
                self._wrap_module(LINEAR, module, part=0)  # the other part is the bias
            elif isinstance(module, MLP):
                self._wrap_activation(module)
            elif isinstance(module, SelfAttention):
                self._wrap_queries(module)

    def remove(self) -> None:
        """Give all kernels back their own functions."""
        while self._undo:
            self._undo.pop()()

    def _wrap_activation(self, mlp: MLP) -> None:
        if ACTIVATION not in self._kinds:
            return
        function = mlp.activation_func
        if isinstance(function, nn.Module):
            self._wrap_module(ACTIVATION, function)
        elif not mlp.config.bias_activation_fusion and (
            mlp.config.use_te_activation_func or not mlp.config.gated_linear_unit
        ):  # a fused MLP compares this very function; a gated one computes something else beside it
            mlp.activation_func = self._recomputer.recorded(ACTIVATION, function)
            self._undo.append(partial(setattr, mlp, "activation_func", function))

    def _wrap_module(self, producer: str, module: nn.Module, part: int | None = None) -> None:
        if producer in self._kinds:
            self._undo.append(override_forward(module, self._recomputer.recorded(producer, module.forward, part)))

    def _wrap_queries(self, attention: SelfAttention) -> None:
        """Record queries that are a copy out of linear_qkv's output: several heads share one of keys and values."""
        if ROTARY not in self._kinds or not isinstance(attention.q_layernorm, IdentityOp | None):
            return
        plain = attention.get_query_key_value_tensors

        @functools.wraps(plain)
        def records(*arguments: Any, **options: Any) -> Any:
            parts = plain(*arguments, **options)
            if torch.is_grad_enabled() and len(parts) == 3:
                record_queries(self._recomputer, parts[0], parts[2])
            return parts

        attention.get_query_key_value_tensors = records  # type: ignore[method-assign]
        self._undo.append(partial(delattr, attention, "get_query_key_value_tensors"))


def record_queries(recomputer: Recomputer, query: torch.Tensor, value: torch.Tensor) -> None:
    """Record ``query``: a copy out of the storage that ``value`` is a view of, head by head before keys and values.

    Both are [sequence, batch, heads, channels]; query has as many heads as value or a multiple.
    """
    (num_tokens, size, groups, channels), heads = value.shape, query.shape[2]
    width = heads // groups * channels
    is_cut_out = (value.storage_offset(), value.stride(2)) == (width + channels, width + 2 * channels)
    if is_cut_out and query.untyped_storage()._cdata != value.untyped_storage()._cdata:
        shape, stride = (num_tokens, size, groups, width), (*value.stride()[:3], 1)
        source = value.detach().as_strided(shape, stride, 0)
        recomputer.record(ROTARY, torch.Tensor.reshape, (source, query.shape), {}, query)


def record_copy(recomputer: Recomputer, given: Any, used: Any) -> None:
    """Record ``used``: TransformerEngine has copied ``given``, the same numbers, to a storage of their own."""
    if used is not given and torch.is_grad_enabled():
        recomputer.record(ROTARY, torch.Tensor.contiguous, (given,), {}, used)


def record_norm_of_linear(
    recomputer: Recomputer,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    result: Any,
) -> None:
    """Record what TransformerEngine normalized in a norm-and-linear module: ``result`` is output and statistics.

    This runs inside an autograd function, where gradients are always off: they say nothing of whether it is saved.
    """
    recomputer.record(NORM, lambda *given, **named: function(*given, **named)[0], arguments, options, result[0])

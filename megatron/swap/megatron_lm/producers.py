"""Producers: the kernels of a Megatron layer whose outputs can be recomputed."""

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

from megatron.swap.common.types import ACTIVATION, LINEAR, NORM, PRODUCERS, RESIDUAL, ROTARY
from megatron.swap.engine.overrides import override_forward, override_method
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.megatron_lm.quantized import quantization_context, record_values

LINEARS = ("linear_qkv", "linear_fc1")  # saved by attention and by the activation function


class Producers:
    """Wraps kernels so that they record outputs; ``remove`` unwraps them. Kernels that are functions are patched."""

    def __init__(self, recomputer: Recomputer, kinds: Collection[str] = PRODUCERS) -> None:
        self._recomputer = recomputer
        self._kinds = frozenset(kinds)  # records hold memory until their layer ends
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
        self._wrap_residual(layer)

    def remove(self) -> None:
        """Restore the kernels' own functions."""
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
        ):  # a fused MLP compares this function by identity; a gated one computes more than this function
            mlp.activation_func = self._recomputer.recorded(ACTIVATION, function)
            self._undo.append(partial(setattr, mlp, "activation_func", function))

    def _wrap_module(self, producer: str, module: nn.Module, part: int | None = None) -> None:
        if producer in self._kinds:
            recorded = self._recomputer.recorded(producer, module.forward, part, quantization_context)
            self._undo.append(override_forward(module, recorded))

    def _wrap_residual(self, layer: Any) -> None:
        """Record the sum behind attention, and linear_proj's output, an unsaved summand."""
        attention, make = getattr(layer, "self_attention", None), getattr(layer, "self_attn_bda", None)
        projection = getattr(attention, "linear_proj", None)
        if RESIDUAL not in self._kinds or projection is None or make is None or isinstance(make, nn.Module):
            return
        # With tensor parallelism linear_proj's output is a sum over ranks.
        if layer.config.tensor_model_parallel_size > 1:
            return
        self._wrap_module(RESIDUAL, projection, part=0)

        @functools.wraps(make)
        def makes(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
            return _recorded_sum(self._recomputer, make(training, fused), training)

        self._undo.append(override_method(layer, "self_attn_bda", makes))

    def _wrap_queries(self, attention: SelfAttention) -> None:
        """Record queries that are a copy from linear_qkv's output, as in grouped-query attention."""
        if ROTARY not in self._kinds or not isinstance(attention.q_layernorm, IdentityOp | None):
            return
        plain = attention.get_query_key_value_tensors

        @functools.wraps(plain)
        def records(*arguments: Any, **options: Any) -> Any:
            parts = plain(*arguments, **options)
            if torch.is_grad_enabled() and len(parts) == 3:
                record_queries(self._recomputer, parts[0], parts[2])
            return parts

        self._undo.append(override_method(attention, "get_query_key_value_tensors", records))


def _recorded_sum(
    recomputer: Recomputer, function: Callable[..., torch.Tensor], training: bool
) -> Callable[..., torch.Tensor]:
    """Return Megatron's ``function``, so that each call of training without dropout is recorded."""

    def again(output: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return function((output, bias), residual, 0.0)

    def records(x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: Any, prob: float) -> torch.Tensor:
        result = function(x_with_bias, residual, prob)
        # Dropout gives other bits each time. An evaluation adds in place where no input needs a gradient, which also
        # holds when the function runs again.
        if training and not prob and torch.is_grad_enabled():
            recomputer.record(RESIDUAL, again, (*x_with_bias, residual), {}, result)
        return result

    return records


def record_queries(recomputer: Recomputer, query: torch.Tensor, value: torch.Tensor) -> None:
    """Record ``query`` if it is a copy from the storage of ``value``, where each group's queries precede its keys.

    Both are [sequence, batch, heads, channels]; query has a multiple of the heads of value.
    """
    (num_tokens, size, groups, channels), heads = value.shape, query.shape[2]
    width = heads // groups * channels
    is_cut_out = (value.storage_offset(), value.stride(2)) == (width + channels, width + 2 * channels)
    if is_cut_out and query.untyped_storage()._cdata != value.untyped_storage()._cdata:
        shape, stride = (num_tokens, size, groups, width), (*value.stride()[:3], 1)
        source = value.detach().as_strided(shape, stride, 0)
        recomputer.record(ROTARY, torch.Tensor.reshape, (source, query.shape), {}, query)


def record_copy(recomputer: Recomputer, given: Any, used: Any) -> None:
    """Record ``used``, TransformerEngine's copy of ``given`` in another storage."""
    if used is not given and torch.is_grad_enabled():
        recomputer.record(ROTARY, torch.Tensor.contiguous, (given,), {}, used)


def record_norm_of_linear(
    recomputer: Recomputer, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any],
    result: Any,
) -> None:  # fmt: skip
    """Record the norm output of TransformerEngine's norm-and-linear module: ``result`` is output and statistics."""
    # It runs inside an autograd function, where gradients are always off, so `is_grad_enabled` is not checked.
    output = lambda *given, **named: function(*given, **named)[0]  # noqa: E731
    if type(result[0]) is torch.Tensor:
        recomputer.record(NORM, output, arguments, options, result[0])
    # With 8 bits one kernel normalizes and quantizes, and the output is quantized.
    elif recomputer.is_recording:
        record_values(recomputer, NORM, output, arguments, options, result[0])

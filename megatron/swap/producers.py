"""The Megatron edge for recipes: which of a layer's kernels make what can be made again."""

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

from megatron.swap.autograd import put_forward
from megatron.swap.recipes import Recipes
from megatron.swap.types import ACTIVATION, LINEAR, NORM, PRODUCERS, ROTARY

LINEARS = ("linear_qkv", "linear_fc1")
"""Those whose outputs are saved: by attention, by the activation."""


class Producers:
    """What was put around the kernels of a model's layers; ``remove`` takes it off again.

    Kernels that are functions of a Megatron or TransformerEngine module are reached by patches instead
    (``fused_activations``, ``te_normalization``, ``rotary`` and ``te_qkv_layout`` in ``patches/``).

    Args:
        kinds: of kernels that are to tell, some of ``PRODUCERS``: what is told is held for a while.
    """

    def __init__(self, recipes: Recipes, kinds: Collection[str] = PRODUCERS) -> None:
        self._recipes = recipes
        self._kinds = frozenset(kinds)
        self._undo: list[Callable[[], None]] = []

    def watch(self, layer: nn.Module) -> None:
        """Make the kernels of ``layer`` tell what they make. Experts' linear layers do not: their inputs are sent."""
        for path, module in layer.named_modules():
            if path.endswith("layernorm") and not isinstance(module, IdentityOp):
                self._watch_module(NORM, module)
            elif path.endswith(LINEARS) and "experts" not in path:
                self._watch_module(LINEAR, module, part=0)  # the other part is the bias
            elif isinstance(module, MLP):
                self._watch_activation(module)
            elif isinstance(module, SelfAttention):
                self._watch_queries(module)

    def remove(self) -> None:
        """Give all of them their own functions back."""
        while self._undo:
            self._undo.pop()()

    def _watch_activation(self, mlp: MLP) -> None:
        if ACTIVATION not in self._kinds:
            return
        function = mlp.activation_func
        if isinstance(function, nn.Module):
            self._watch_module(ACTIVATION, function)
        elif not mlp.config.bias_activation_fusion and (
            mlp.config.use_te_activation_func or not mlp.config.gated_linear_unit
        ):  # a fused MLP compares this very function; a gated one computes something else beside it
            mlp.activation_func = self._recipes.watched(ACTIVATION, function)
            self._undo.append(partial(setattr, mlp, "activation_func", function))

    def _watch_module(self, producer: str, module: nn.Module, part: int | None = None) -> None:
        if producer in self._kinds:
            self._undo.append(put_forward(module, self._recipes.watched(producer, module.forward, part)))

    def _watch_queries(self, attention: SelfAttention) -> None:
        """Several heads of queries share one of keys and values: cut out of linear_qkv's output they are a copy."""
        if ROTARY not in self._kinds or not isinstance(attention.q_layernorm, IdentityOp | None):
            return
        plain = attention.get_query_key_value_tensors

        @functools.wraps(plain)
        def tells(*arguments: Any, **options: Any) -> Any:
            parts = plain(*arguments, **options)
            if torch.is_grad_enabled() and len(parts) == 3:
                tell_queries(self._recipes, parts[0], parts[2])
            return parts

        attention.get_query_key_value_tensors = tells  # type: ignore[method-assign]
        self._undo.append(partial(delattr, attention, "get_query_key_value_tensors"))


def tell_queries(recipes: Recipes, query: torch.Tensor, value: torch.Tensor) -> None:
    """``query`` is a copy out of the storage that ``value`` is a view of, head by head before keys and values.

    Both are [sequence, batch, heads, channels]; query has as many heads as value or a multiple.
    """
    (num_tokens, size, groups, channels), heads = value.shape, query.shape[2]
    width = heads // groups * channels
    is_cut_out = (value.storage_offset(), value.stride(2)) == (width + channels, width + 2 * channels)
    if is_cut_out and query.untyped_storage()._cdata != value.untyped_storage()._cdata:
        shape, stride = (num_tokens, size, groups, width), (*value.stride()[:3], 1)
        source = value.detach().as_strided(shape, stride, 0)
        recipes.tell(ROTARY, torch.Tensor.reshape, (source, query.shape), {}, query)


def tell_copy(recipes: Recipes, given: Any, used: Any) -> None:
    """TransformerEngine uses ``used`` instead of ``given``: the same numbers, in a storage of their own."""
    if used is not given and torch.is_grad_enabled():
        recipes.tell(ROTARY, torch.Tensor.contiguous, (given,), {}, used)


def tell_norm_of_linear(
    recipes: Recipes, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], result: Any
) -> None:
    """TransformerEngine normalized inside a norm-and-linear module: ``result`` is the output and its statistics.

    This runs inside an autograd function, where gradients are always off: what is not saved is forgotten by itself.
    """
    recipes.tell(NORM, lambda *given, **named: function(*given, **named)[0], arguments, options, result[0])

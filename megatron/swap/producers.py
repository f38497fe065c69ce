"""The Megatron edge for recipes: which of a layer's kernels make what can be made again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from torch import nn

from megatron.swap.recipes import Recipes
from megatron.swap.types import ACTIVATION, NORM


class Producers:
    """What was put around the norms and activation functions of a model's layers; ``remove`` takes it off again.

    Kernels that are functions of a Megatron or TransformerEngine module are reached by patches instead
    (``patches/fused_activations.py``, ``patches/te_normalization.py``).
    """

    def __init__(self, recipes: Recipes) -> None:
        self._recipes = recipes
        self._undo: list[Callable[[], None]] = []

    def watch(self, layer: nn.Module) -> None:
        """Make the norms and activation functions of ``layer`` tell what they make."""
        for path, module in layer.named_modules():
            if path.endswith("layernorm") and not isinstance(module, IdentityOp):
                self._watch_module(NORM, module)
            elif isinstance(module, MLP):
                self._watch_activation(module)

    def remove(self) -> None:
        """Give all of them their own functions back."""
        while self._undo:
            self._undo.pop()()

    def _watch_activation(self, mlp: MLP) -> None:
        function = mlp.activation_func
        if isinstance(function, nn.Module):
            self._watch_module(ACTIVATION, function)
        elif not mlp.config.bias_activation_fusion and (
            mlp.config.use_te_activation_func or not mlp.config.gated_linear_unit
        ):  # a fused MLP compares this very function; a gated one computes something else beside it
            mlp.activation_func = self._recipes.watched(ACTIVATION, function)
            self._undo.append(partial(setattr, mlp, "activation_func", function))

    def _watch_module(self, producer: str, module: nn.Module) -> None:
        module.forward = self._recipes.watched(producer, module.forward)  # type: ignore[method-assign]
        self._undo.append(partial(delattr, module, "forward"))


def tell_norm_of_linear(
    recipes: Recipes, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], result: Any
) -> None:
    """TransformerEngine normalized inside a norm-and-linear module: ``result`` is the output and its statistics.

    This runs inside an autograd function, where gradients are always off: what is not saved is forgotten by itself.
    """
    recipes.tell(NORM, lambda *given, **named: function(*given, **named)[0], arguments, options, result[0])

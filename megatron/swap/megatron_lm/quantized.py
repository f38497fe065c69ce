"""TransformerEngine's quantized tensors: which may be taken apart, and how their values are computed again.

A quantizer turns a tensor into 8-bit values and their scales. For backward its module keeps the values for one
direction of the matrix product. They reach autograd as plain tensors, and are records' outputs here. Scales are small:
they are kept or offloaded.

With delayed scaling a quantizer reads a scale that the next steps overwrite, and notes the largest value for its
history. A recomputation reads a copy of the scale, and notes the largest value in a tensor that nobody reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from megatron.swap.common.types import QUANTIZED
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.wrapper_tensors import WrapperRules

ROWWISE, TRANSPOSE = "_data", "_transpose"  # values of a tensor with one scale, and the same transposed
# Attributes of quantized tensors that hold 8-bit values. The others hold scales.
VALUES = (ROWWISE, TRANSPOSE, "_rowwise_data", "_columnwise_data")

# Quantizers that give the same values again. TransformerEngine says so itself from 2.19 on.
DETERMINISTIC = frozenset({"Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "MXFP8Quantizer"})


def wrapper_rules() -> WrapperRules | None:
    """Return the rules for TransformerEngine's wrapper tensors, or None if it is missing or has none."""
    if not HAVE_TE:
        return None
    try:
        from transformer_engine.pytorch.tensor import QuantizedTensor
    except ImportError:  # before TransformerEngine 2.0
        return None
    return WrapperRules(kinds=(QuantizedTensor,), caches=caches)


def caches(tensor: Any) -> Collection[str]:
    """Return the inner tensors that TransformerEngine makes of the others: a transpose beside its original."""
    if getattr(tensor, ROWWISE, None) is None or getattr(tensor, TRANSPOSE, None) is None:
        return ()
    return (TRANSPOSE,)


def private_copy(quantizer: Any) -> Any | None:
    """Return a copy of ``quantizer`` that gives the same values later and changes no other's state, or None."""
    # The largest value is agreed on with other ranks.
    if getattr(quantizer, "with_amax_reduction", False):
        return None
    scale, amax = getattr(quantizer, "scale", None), getattr(quantizer, "amax", None)
    if isinstance(scale, torch.Tensor) and isinstance(amax, torch.Tensor):
        copy = quantizer.copy()
        copy.scale, copy.amax = scale.clone(), torch.zeros_like(amax)
        return copy
    # Some quantizers round at random.
    is_safe = getattr(quantizer, "is_requantization_safe", None)
    gives_same = type(quantizer).__name__ in DETERMINISTIC if is_safe is None else is_safe()
    return quantizer.copy() if gives_same else None


def record_values(
    recomputer: Recomputer, producer: str, function: Callable[..., Any], arguments: tuple[Any, ...],
    options: dict[str, Any], quantized: Any,
) -> None:  # fmt: skip
    """Record the values of ``quantized``, which ``function`` returned; a quantizer is among the arguments."""
    given = (*arguments, *options.values())
    quantizers = [value for value in given if hasattr(value, "rowwise_usage") and hasattr(value, "quantize")]
    copies = {id(quantizer): private_copy(quantizer) for quantizer in quantizers}
    if None in copies.values():
        return
    arguments = tuple(copies.get(id(value), value) for value in arguments)
    options = {name: copies.get(id(value), value) for name, value in options.items()}
    for name in VALUES:
        values = getattr(quantized, name, None)
        if values is not None:
            recomputer.record(producer, _taking(name, function), arguments, options, values)


def _taking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns only the values ``name`` of the results of ``function``."""
    return lambda *given, **named: getattr(function(*given, **named), name)


def record_quantization(
    recomputer: Recomputer, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any],
    quantized: Any,
) -> None:  # fmt: skip
    """Record the values that ``function(quantizer, tensor)`` made, as the kind of the tensor's producer."""
    # It runs inside autograd functions, where gradients are always off, so `is_grad_enabled` is not checked.
    if not recomputer.is_recording or len(arguments) != 2 or options.get("out") is not None:
        return  # a cached weight is updated in place
    producer = recomputer.producer_of(arguments[1].untyped_storage()) or QUANTIZED
    record_values(recomputer, producer, function, arguments, options, quantized)


def quantization_context() -> Callable[[], AbstractContextManager[Any]] | None:
    """Return a maker of contexts in which TransformerEngine's modules compute as now, or None if any will do."""
    if not HAVE_TE:
        return None
    # 8 bits are off in backward. Each context switches them off first, wherever it is entered, so that a recomputation
    # that is compared within forward runs as in backward.
    manager, autocast = upstream()
    if not manager.is_fp8_enabled():
        return None
    recipe, group = manager.get_fp8_recipe(), manager.get_fp8_group()

    def context() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(autocast(False, None, None))
        stack.enter_context(autocast(True, recipe, group))
        return stack

    return context


@functools.cache
def upstream() -> tuple[Any, Callable[[bool, Any, Any], AbstractContextManager[Any]]]:
    """Return TransformerEngine's state of 8 bits, and a function that makes its context of: on, recipe, group."""
    try:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast
    except ImportError:  # before TransformerEngine 2.8
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast

        return FP8GlobalStateManager, lambda on, recipe, group: fp8_autocast(
            enabled=on, fp8_recipe=recipe, fp8_group=group
        )
    return FP8GlobalStateManager, lambda on, recipe, group: autocast(
        enabled=on, recipe=recipe, amax_reduction_group=group
    )

"""The checkpoint that runs a whole layer again in backward: Megatron's, or TransformerEngine's in 8 bits.

Megatron's restores random states. TransformerEngine's also restores the recipe, which is off in backward, and with
delayed scaling the scales of forward; histories get no value twice. Megatron itself uses it in 8 bits.
"""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE, te_checkpoint

from megatron.swap.common.types import UsageError
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.layers.run import Checkpoint


def can_recompute_layers(facts: MegatronFacts) -> bool:
    """Return whether a plan may recompute whole layers of the model of these facts."""
    if facts.fp8 or facts.fp4:
        return bool(facts.fp8) and HAVE_TE
    return has_megatrons_checkpoint()


def layer_checkpoint(number: int, config: Any) -> Checkpoint:
    """Return the checkpoint for layer ``number`` with Megatron's ``config``. Raises a ``UsageError`` if it has none."""
    if config.fp4:
        raise UsageError(
            f"layer {number} is to be recomputed whole, with --fp4-format {config.fp4}: values that are rounded at "
            "random would differ. Drop --fp4-format, or swap the layer."
        )
    if config.fp8:  # as Megatron's full recomputation in 8 bits
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return lambda function, *tensors: te_checkpoint(function, False, tracker, None, *tensors)
    _check_megatrons(f"layer {number}, which is to be recomputed whole,")
    # It restores all random states before ``function`` runs again in backward.
    return lambda function, *tensors: tensor_parallel.checkpoint(function, False, *tensors)


def check_full_recomputation(config: Any) -> None:
    """Raise a ``UsageError`` for Megatron's full recomputation by a checkpoint whose backward was replaced."""
    if not config.fp8 and not config.fp4:
        _check_megatrons("full recomputation (recompute_granularity)")


def has_megatrons_checkpoint() -> bool:
    """Return whether Megatron's checkpoint is its own."""
    # verl replaces the checkpoint's backward by a function that empties saved inputs.
    return tensor_parallel.random.CheckpointFunction.backward.__module__.startswith("megatron.core.")


def _check_megatrons(what: str) -> None:
    """Refuse to recompute layers by a checkpoint that is not Megatron's: it may empty tensors that are ours."""
    if not has_megatrons_checkpoint():
        found = tensor_parallel.random.CheckpointFunction.backward.__module__
        raise UsageError(
            f"{what} needs Megatron's checkpoint, whose backward {found} has replaced. Recompute single tensors "
            "instead (--swap-recompute), give a budget, or leave layers whole."
        )

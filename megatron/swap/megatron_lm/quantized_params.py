"""Model parameters in 8 bits (``--fp8-param-gather``), computed from main parameters that are offloaded.

Megatron quantizes all of them at once after the optimizer's step: a parameter's scale follows from its largest value on
all data-parallel ranks. Here the main parameters come back in batches that fit into a bucket. All ranks take the same
parameters in the same order, with or without a shard of them, because each call agrees on scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.fp8_utils import quantize_param_shard
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.swap.optimizer.param_state import batches
from megatron.swap.optimizer.stepper import OptimizerStepper

# Main parameters that are quantized at a time, other ranks' shards included. A single parameter may be larger.
BATCH_BYTES = 512 << 20

# Method that gives the members of a parameter of several experts, since megatron-core 0.19.
EXPAND = "_expand_quantized_param_shard_for_cast"


def has_quantized_params(optimizer: Any) -> bool:
    """Return whether ``optimizer``, one of Megatron's, computes parameters in 8 bits from main parameters."""
    return isinstance(optimizer, DistributedOptimizer) and bool(optimizer.ddp_config.fp8_param_gather)


def quantized_params(optimizer: DistributedOptimizer) -> list[torch.Tensor]:
    """Return the model's parameters in 8 bits, in an order that is the same on all ranks."""
    return list(optimizer._get_fp8_params_and_shard_fp32_from_fp8()[0])


def main_params_of_quantized(optimizer: DistributedOptimizer) -> list[torch.Tensor]:
    """Return the main parameters of ``quantized_params``: this rank's shards."""
    mains = optimizer._get_fp8_params_and_shard_fp32_from_fp8()[1]
    return [main for main in mains if main is not None]


@torch.no_grad()
def quantize_params(optimizer: DistributedOptimizer, stepper: OptimizerStepper) -> None:
    """Compute the model's parameters in 8 bits from the main parameters, wherever these are."""
    for batch in _batches(optimizer):
        models: list[torch.Tensor] = []
        mains: list[torch.Tensor | None] = []
        offsets: list[int | None] = []
        for model, main, offset in batch:
            values = None if main is None else stepper.values_of(main)
            expand = getattr(optimizer, EXPAND, lambda *entry: ([one] for one in entry))
            of_models, of_mains, of_offsets = expand(model, values, offset)
            models += of_models
            mains += of_mains
            offsets += of_offsets
        quantize_param_shard(models, mains, offsets, optimizer.data_parallel_group)


def _batches(optimizer: DistributedOptimizer) -> Iterator[list[tuple[torch.Tensor, torch.Tensor | None, int | None]]]:
    """Return parameters, this rank's shards of their main parameters, and the shards' offsets."""
    rows = zip(*optimizer._get_fp8_params_and_shard_fp32_from_fp8(), strict=True)
    return batches(rows, lambda row: row[0].numel() * torch.float32.itemsize, BATCH_BYTES)

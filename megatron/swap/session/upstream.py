"""The patches of upstream that a run needs."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from megatron.swap.common.config import SwapConfig
from megatron.swap.common.types import ACTIVATION, NORM, QUANTIZED, ROTARY, UsageError
from megatron.swap.devices.host_writes import can_write, write_to_host
from megatron.swap.devices.lasting_memory import lasting_memory
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.megatron_lm import cross_entropy, weight_gradients
from megatron.swap.megatron_lm.param_copies import off_device
from megatron.swap.megatron_lm.producers import record_copy, record_norm_of_linear
from megatron.swap.megatron_lm.quantized import record_quantization
from megatron.swap.memory.host_memory import local_world_size, safe_host_bytes
from megatron.swap.patches import (
    checkpointed_forward,
    fused_activations,
    get_megatron_optimizer,
    linear_weight_gradients,
    main_params,
    param_buffer,
    recompile_limit,
    registry,
    rope_offsets,
    rotary,
    te_normalization,
    te_qkv_layout,
    te_quantize,
    te_restored_weight,
    te_weight_copies,
    token_counts,
    train,
    training_log,
    weight_gradient_kernel,
)
from megatron.swap.patches.cross_entropy import cross_entropy_patch
from megatron.swap.patches.registry import AppliedPatches, Misfit, Patch

_supplied: list[AppliedPatches] = []


class ModelEvents(Protocol):
    """The callbacks from patched functions that a model's forward calls."""

    def around_checkpointed_forward(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return the context for a block's forward with full recomputation."""

    def recomputer(self) -> Recomputer | None:
        """Return the recomputer of this rank; ``None`` before the model is built, or if nothing is recomputed."""


class TrainerEvents(ModelEvents, Protocol):
    """The callbacks from Megatron's trainer too, in the order of their calls."""

    def on_main_param_created(self, param: torch.Tensor) -> None:
        """Called when Megatron's optimizer has made ``param``, before it makes the next one."""

    def on_optimizer_built(self, optimizer: Any) -> None:
        """Called when Megatron's optimizer is complete, before a checkpoint is loaded into it."""

    def on_begin(self) -> None:
        """Called before the first step; an exception that it raises ends training."""

    def on_iteration(
        self,
        iteration: int,
        losses: dict[str, torch.Tensor],
        grad_norm: Any,
        is_logged: bool,
        writer: Any,
        averages_next: bool = False,
    ) -> None:
        """Called after each iteration, when Megatron has logged it."""

    def on_finish(self, failure: BaseException | None, chunks: Sequence[nn.Module], optimizer: Any) -> None:
        """Called when training has ended, with the ``failure`` that ended it or ``None``."""


@dataclass(frozen=True)
class RunPatches:
    """The patches of a run: those that it ``needs``, and ``optional`` ones whose features it can do without."""

    needs: list[Patch]
    optional: list[Patch]


def patches_of(args: Namespace, config: SwapConfig, kinds: Collection[str], events: TrainerEvents) -> RunPatches:
    """Return the patches that a run of Megatron's trainer needs, and those that it uses where they fit.

    Args:
        args: Megatron's parsed arguments.
        kinds: producers whose outputs may be recomputed, some of ``PRODUCERS``.
        events: called by the patched functions.
    """
    of_model = patches_of_model(args, config, kinds, events)
    needs = [
        train.train_patch(events.on_begin, events.on_finish),
        training_log.training_log_patch(events.on_iteration),
        *of_model.needs,
    ]
    optional = of_model.optional
    if config.optimizer:
        needs += main_params.main_params_patches(events.on_main_param_created)
        needs.append(get_megatron_optimizer.get_megatron_optimizer_patch(events.on_optimizer_built))
    elif config.acts:
        optional += main_params.main_params_patches()
    if config.attaches:
        # Measured here, before any rank takes host memory.
        host_bytes = safe_host_bytes(local_world_size()).safe_bytes
        optional.append(param_buffer.param_buffer_patch(functools.partial(off_device, host_bytes=host_bytes)))
    return RunPatches(needs, optional)


def patches_of_model(
    args: Namespace, config: SwapConfig, kinds: Collection[str], events: ModelEvents, *, patches_full: bool = True
) -> RunPatches:
    """Return the patches that a model's forward and backward need, and those that they use where they fit.

    Args:
        args: Megatron's parsed arguments, or what they would be for this model.
        kinds, events: as for ``patches_of``.
        patches_full: a block's full recomputation is Megatron's function, no method of the block.
    """
    needs: list[Patch] = []
    optional: list[Patch] = []
    if config.acts:
        needs.append(recompile_limit.PATCH)
    if config.attaches:
        optional.append(cross_entropy_patch(cross_entropy.chunked_cross_entropy))
    if config.attaches and args.num_experts and torch.cuda.is_available():  # else it is patched for the CPU
        optional.append(token_counts.token_counts_patch(can_write, write_to_host))
    if args.gradient_accumulation_fusion:
        optional.append(linear_weight_gradients.PATCH)
    if config.acts and args.recompute_granularity == "full" and patches_full:
        needs.append(checkpointed_forward.checkpointed_forward_patch(events.around_checkpointed_forward))
    with_te = args.transformer_impl == "transformer_engine"
    if config.attaches and with_te and args.apply_rope_fusion and torch.cuda.is_available():
        optional += rope_offsets.PATCHES
    for kind in kinds:
        is_asked_for = kind in config.recompute  # otherwise the planner or a plan may use it
        (needs if is_asked_for else optional).extend(_producer_patches(kind, events, with_te=with_te))
    quantized = {ACTIVATION, QUANTIZED}.intersection(kinds)
    if quantized and args.fp8 and with_te:
        record = functools.partial(_record, events, record_quantization)
        (needs if quantized.intersection(config.recompute) else optional).append(te_quantize.te_quantize_patch(record))
    if config.recomputes_fp8_weights and args.gradient_accumulation_fusion and torch.cuda.is_available():
        needs.append(te_restored_weight.PATCH)
    if config.attaches and args.fp8 and with_te and torch.cuda.is_available():
        optional += te_weight_copies.te_weight_copies_patches(lasting_memory)
    return RunPatches(needs, optional)


def supply_fusion_kernel(args: Namespace) -> Sequence[Misfit]:
    """Give Megatron's linear layers TransformerEngine's kernel where they fuse gradients and apex has none for them.

    It stays for the whole process: the backward of every model that is built with it calls it.

    Returns:
        The patches that do not fit, so that there is no kernel.
    """
    kernel = weight_gradients.te_kernel() if args.gradient_accumulation_fusion else None
    if kernel is None or weight_gradients.has_kernel():
        return []
    patches = weight_gradient_kernel.weight_gradient_kernel_patches(kernel)
    misfits = registry.find_misfits(patches)
    if not misfits:
        _supplied.append(registry.apply(patches))
    return misfits


def refuse_fusion_without_kernel(args: Namespace) -> None:
    """Refuse to fuse gradients where linear layers have no kernel for it: Megatron fails when it builds the model.

    Raises:
        UsageError: they have none.
    """
    if args.gradient_accumulation_fusion and not weight_gradients.has_kernel():
        raise UsageError(weight_gradients.lacks_kernel())


def switch_fusion_off(left_out: Sequence[Misfit], args: Namespace, model_config: Any) -> bool:
    """Switch Megatron's fused gradient accumulation off if its patch is among those ``left_out``; return whether it is.

    Without the patch, Megatron's linear layers lose the gradients of their weights.

    Args:
        model_config: Megatron's model config, or ``None`` if the model's is made from ``args`` later.
    """
    if all(misfit.patch is not linear_weight_gradients.PATCH for misfit in left_out):
        return False
    args.gradient_accumulation_fusion = False
    if model_config is not None:
        model_config.gradient_accumulation_fusion = False
    return True


def refuse_fusion(chunks: Sequence[Any]) -> None:
    """Refuse a model that was configured before ``switch_fusion_off``.

    Raises:
        UsageError: its linear layers would lose gradients.
    """
    if any(chunk.config.gradient_accumulation_fusion for chunk in chunks):
        raise UsageError(
            "This model fuses gradient accumulation, and with this Megatron's linear layers its gradients would be "
            "lost. Add --no-gradient-accumulation-fusion."
        )


def _producer_patches(kind: str, events: ModelEvents, *, with_te: bool) -> list[Patch]:
    """Return the patches of functions that upstream calls by name and whose outputs can be recomputed."""
    patches: list[Patch] = []
    if kind == ACTIVATION:
        patches += fused_activations.fused_activations_patches(functools.partial(_recorded, events, ACTIVATION))
    if kind == NORM and with_te:
        record = functools.partial(_record, events, record_norm_of_linear)
        patches.append(te_normalization.te_normalization_patch(record))
    if kind == ROTARY:
        patches.append(rotary.rotary_patch(functools.partial(_recorded, events, ROTARY)))
    if kind == ROTARY and with_te:
        patches.append(te_qkv_layout.te_qkv_layout_patch(functools.partial(_record, events, record_copy)))
    return patches


def _recorded(events: ModelEvents, producer: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` and records its output with its inputs.

    Upstream may call it before there is a model; until then nothing is recorded.
    """

    @functools.wraps(function)
    def recorded(*arguments: Any, **options: Any) -> Any:
        output = function(*arguments, **options)
        recomputer = events.recomputer()
        if recomputer is not None and torch.is_grad_enabled():
            recomputer.record(producer, function, arguments, options, output)
        return output

    return recorded


def _record(events: ModelEvents, record: Callable[..., None], *arguments: Any) -> None:
    recomputer = events.recomputer()
    if recomputer is not None:
        record(recomputer, *arguments)

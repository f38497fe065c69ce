"""The patches of upstream that a run of Megatron's trainer needs."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from megatron.swap.common.settings import Settings
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm import weight_gradients
from megatron.swap.megatron_lm.model_patches import ModelEvents, RunPatches, patches_of_model
from megatron.swap.megatron_lm.param_copies import off_device
from megatron.swap.memory.host_memory import local_world_size, safe_host_bytes
from megatron.swap.patches import (
    get_megatron_optimizer,
    linear_weight_gradients,
    main_params,
    param_buffer,
    registry,
    train,
    training_log,
    weight_gradient_kernel,
)
from megatron.swap.patches.registry import AppliedPatches, Misfit

_supplied: list[AppliedPatches] = []


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


def patches_of(facts: MegatronFacts, settings: Settings, kinds: Collection[str], events: TrainerEvents) -> RunPatches:
    """Return the patches that a run of Megatron's trainer needs, and those that it uses where they fit.

    The patched functions call ``events``.
    """
    of_model = patches_of_model(facts, settings, kinds, events)
    needs = [
        train.train_patch(events.on_begin, events.on_finish),
        training_log.training_log_patch(events.on_iteration),
        *of_model.needs,
    ]
    optional = of_model.optional
    if settings.offload_fraction:
        needs += main_params.main_params_patches(events.on_main_param_created)
        needs.append(get_megatron_optimizer.get_megatron_optimizer_patch(events.on_optimizer_built))
    elif settings.acts:
        optional += main_params.main_params_patches()
    if settings.attaches:
        # Measured here, before any rank takes host memory.
        host_bytes = safe_host_bytes(local_world_size()).safe_bytes
        optional.append(param_buffer.param_buffer_patch(functools.partial(off_device, host_bytes=host_bytes)))
    return RunPatches(needs, optional)


def supply_fusion_kernel(args: Namespace) -> Sequence[Misfit]:
    """Give Megatron's linear layers TransformerEngine's kernel if they fuse gradients and apex has none for them.

    Return the patches that do not fit, so that there is no kernel.
    """
    kernel = weight_gradients.te_kernel() if args.gradient_accumulation_fusion else None
    if kernel is None or weight_gradients.has_kernel():
        return []
    patches = weight_gradient_kernel.weight_gradient_kernel_patches(kernel)
    misfits = registry.find_misfits(patches)
    if not misfits:
        # For the whole process: the backward of every model that is built with it calls it.
        _supplied.append(registry.apply(patches))
    return misfits


def refuse_fusion_without_kernel(args: Namespace) -> None:
    """Raise a ``UsageError`` if linear layers fuse gradients without a kernel."""
    # Megatron itself fails only when it builds the model.
    if args.gradient_accumulation_fusion and not weight_gradients.has_kernel():
        raise UsageError(weight_gradients.lacks_kernel())


def switch_fusion_off(left_out: Sequence[Misfit], args: Namespace, model_config: Any) -> bool:
    """Switch Megatron's fused gradient accumulation off if its patch is among those ``left_out``. Return whether it is.

    ``model_config`` is None if the model's is made from ``args`` later.
    """
    if all(misfit.patch is not linear_weight_gradients.PATCH for misfit in left_out):
        return False
    # Without the patch, Megatron's linear layers lose the gradients of their weights.
    args.gradient_accumulation_fusion = False
    if model_config is not None:
        model_config.gradient_accumulation_fusion = False
    return True

"""The patches of upstream that a model needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from megatron.swap.common.settings import Settings
from megatron.swap.common.types import ACTIVATION, NORM, QUANTIZED, ROTARY, UsageError
from megatron.swap.devices.host_writes import can_write, write_to_host
from megatron.swap.devices.lasting_memory import lasting_memory
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm import cross_entropy
from megatron.swap.megatron_lm.producers import record_copy, record_norm_of_linear
from megatron.swap.megatron_lm.quantized import record_quantization
from megatron.swap.patches import (
    checkpointed_forward,
    fused_activations,
    linear_weight_gradients,
    recompile_limit,
    rope_offsets,
    rotary,
    te_normalization,
    te_qkv_layout,
    te_quantize,
    te_restored_weight,
    te_weight_copies,
    token_counts,
)
from megatron.swap.patches.cross_entropy import cross_entropy_patch
from megatron.swap.patches.registry import Patch


class ModelEvents(Protocol):
    """The callbacks from patched functions that a model's forward calls."""

    def around_checkpointed_forward(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return the context for a block's forward with full recomputation."""

    def recomputer(self) -> Recomputer | None:
        """Return the recomputer of this rank; None before the model is built, or if nothing is recomputed."""


@dataclass(frozen=True)
class RunPatches:
    """The patches of a run: those that it ``needs``, and ``optional`` ones whose features it can do without."""

    needs: list[Patch]
    optional: list[Patch]


def patches_of_model(
    facts: MegatronFacts, settings: Settings, kinds: Collection[str], events: ModelEvents, *, patches_full: bool = True
) -> RunPatches:
    """Return the patches that a model needs or uses. ``patches_full``: full recomputation is Megatron's function."""
    needs: list[Patch] = []
    optional: list[Patch] = []
    if settings.acts:
        needs.append(recompile_limit.PATCH)
    if settings.attaches:
        optional.append(cross_entropy_patch(cross_entropy.chunked_cross_entropy))
    if settings.attaches and facts.num_experts and torch.cuda.is_available():  # else it is patched for the CPU
        optional.append(token_counts.token_counts_patch(can_write, write_to_host))
    if facts.gradient_accumulation_fusion:
        optional.append(linear_weight_gradients.PATCH)
    if settings.acts and facts.recompute_granularity == "full" and patches_full:
        needs.append(checkpointed_forward.checkpointed_forward_patch(events.around_checkpointed_forward))
    with_te = facts.transformer_impl == "transformer_engine"
    if settings.attaches and with_te and facts.apply_rope_fusion and torch.cuda.is_available():
        optional += rope_offsets.PATCHES
    for kind in kinds:
        is_asked_for = kind in settings.recompute  # otherwise the planner or a plan may use it
        (needs if is_asked_for else optional).extend(_producer_patches(kind, events, with_te=with_te))
    quantized = {ACTIVATION, QUANTIZED}.intersection(kinds)
    if quantized and facts.fp8 and with_te:
        record = functools.partial(_record, events, record_quantization)
        is_asked_for = bool(quantized.intersection(settings.recompute))
        (needs if is_asked_for else optional).append(te_quantize.te_quantize_patch(record))
    if settings.recomputes_fp8_weights and facts.gradient_accumulation_fusion and torch.cuda.is_available():
        needs.append(te_restored_weight.PATCH)
    if settings.attaches and facts.fp8 and with_te and torch.cuda.is_available():
        optional += te_weight_copies.te_weight_copies_patches(lasting_memory)
    return RunPatches(needs, optional)


def refuse_fusion(chunks: Sequence[Any]) -> None:
    """Raise a ``UsageError`` for a model configured before ``switch_fusion_off``: it would lose gradients."""
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
    """Return a function that calls ``function`` and records its output with its inputs."""

    @functools.wraps(function)
    def recorded(*arguments: Any, **options: Any) -> Any:
        output = function(*arguments, **options)
        # None while upstream calls it before there is a model.
        recomputer = events.recomputer()
        if recomputer is not None and torch.is_grad_enabled():
            recomputer.record(producer, function, arguments, options, output)
        return output

    return recorded


def _record(events: ModelEvents, record: Callable[..., None], *arguments: Any) -> None:
    recomputer = events.recomputer()
    if recomputer is not None:
        record(recomputer, *arguments)

"""Boundaries around the transformer layers of a Megatron model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.transformer.attention import CrossAttentionSubmodules, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import nn

from megatron.swap.common.layer_ranges import format_ranges
from megatron.swap.common.site_paths import CHECKPOINT_PATH, OWN_PATH
from megatron.swap.common.types import LayerPosition, Site, UsageError, layer_positions
from megatron.swap.engine.handle import Group
from megatron.swap.engine.overrides import override_method
from megatron.swap.engine.policy import Policy, matches
from megatron.swap.engine.saved_tensors import SavedTensors
from megatron.swap.layers.layers import Layers
from megatron.swap.layers.run import LayerSpec, Rerun
from megatron.swap.megatron_lm import layer_reads
from megatron.swap.megatron_lm.layer_checkpoint import check_full_recomputation, layer_checkpoint
from megatron.swap.megatron_lm.producers import Producers


def known_modules() -> list[str]:
    """Return the submodule names that ``--swap-modules`` may use, from the specs of the installed megatron-core."""
    names = {OWN_PATH, CHECKPOINT_PATH}
    for spec in (
        TransformerLayerSubmodules, SelfAttentionSubmodules, CrossAttentionSubmodules, MLASelfAttentionSubmodules,
        MLPSubmodules, MoESubmodules,
    ):  # fmt: skip
        names.update(field.name for field in dataclasses.fields(spec))
    return sorted(name for name in names if not name.endswith(("_bda", "_map")))


def check_stacks(chunks: Sequence[nn.Module]) -> None:
    """Raise a ``UsageError`` if a stack of Megatron's layers is no ``TransformerBlock``: it would not be swapped."""
    # Hybrid models have such a stack; so has a multimodal model, beside the block of its vision model.
    for chunk in chunks:
        for name, module in chunk.named_modules():
            layers = module._modules.get("layers")
            if isinstance(module, TransformerBlock) or not isinstance(layers, nn.ModuleList):
                continue
            if any(isinstance(layer, GraphableMegatronModule) for layer in layers):
                raise UsageError(
                    f"{name or 'the model'} is a {type(module).__name__} of {len(layers)} layers, which is not "
                    "swapped: only layers in a TransformerBlock of Megatron are. Train this model without swapping."
                )


def check_one_stack(chunks: Sequence[nn.Module]) -> None:
    """Raise a ``UsageError`` if two layers have one number (several stacks): a plan names layers by number."""
    stacks = {
        name: [layer.layer_number - 1 for layer in module.layers]
        for chunk in chunks for name, module in chunk.named_modules()
        if isinstance(module, TransformerBlock) and module.layers
    }  # fmt: skip
    numbers = [number for stack in stacks.values() for number in stack]
    if len(set(numbers)) != len(numbers):
        raise UsageError(
            "--swap-memory-gib, --swap-memory-fraction and --swap-policy auto plan one stack of layers, and this model "
            f"has {len(stacks)}: {', '.join(f'{name} (layers {format_ranges(own)})' for name, own in stacks.items())}. "
            "Choose the layers instead: --swap-layers all, or numbers, which count in each stack."
        )


class MegatronLayers(Layers):
    """The boundaries around Megatron's layers. ``producers`` record outputs; ``modules`` are patterns of what swaps."""

    def __init__(
        self, saved_tensors: SavedTensors, policy: Policy, modules: Sequence[str], producers: Producers | None = None,
        errors: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        super().__init__(saved_tensors, policy, errors)
        self._modules = modules
        self._producers = producers
        self._segments: dict[TransformerBlock, CheckpointedSegments] = {}
        self._undo: list[Callable[[], None]] = []

    def add(self, chunk: nn.Module) -> None:
        """Bound all layers of ``chunk``, or raise a ``UsageError``: unknown ``modules``, or another's checkpoint."""
        ends_in_loss = bool(getattr(chunk, "post_process", True))
        for block in (module for module in chunk.modules() if isinstance(module, TransformerBlock)):
            layers = list(block.layers)
            numbers = [layer.layer_number - 1 for layer in layers]
            _check_modules(self._modules, layers)
            on_run_without_grad = None
            if block.config.recompute_granularity == "full":
                check_full_recomputation(block.config)
                positions = layer_positions([self._policy.swaps_layer(number) for number in numbers], ends_in_loss)
                segments = CheckpointedSegments(self._saved_tensors, dict(zip(numbers, positions, strict=True)))
                self._segments[block] = segments
                on_run_without_grad = segments.on_run
                if has_own_checkpointed_forward(block):
                    own = segments.swapping()(getattr(block, OWN_CHECKPOINTED_FORWARD))
                    self._undo.append(override_method(block, OWN_CHECKPOINTED_FORWARD, own))
            for number, layer in zip(numbers, layers, strict=True):
                is_made = self._policy.recomputes_layer(number) and not self._policy.recomputes_whole(number)
                if self._producers is not None and is_made:
                    self._producers.wrap(layer)
            specs = [_spec(layer, number, on_run_without_grad) for number, layer in zip(numbers, layers, strict=True)]
            self.install(specs, ends_in_loss=ends_in_loss)

    def around_checkpointed_forward(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return a context for a block's forward with full recomputation."""
        segments = self._segments.get(block)  # type: ignore[call-overload]
        if segments is None or has_own_checkpointed_forward(block):  # whose own method has its context already
            return nullcontext()
        return segments.swapping()

    def remove(self) -> None:
        """Give all layers back their own forward."""
        super().remove()
        while self._undo:
            self._undo.pop()()
        if self._producers is not None:
            self._producers.remove()
        self._segments.clear()


def _spec(layer: Any, number: int, on_run_without_grad: Callable[[int], None] | None) -> LayerSpec:
    rerun = Rerun(
        checkpoint=lambda: layer_checkpoint(number, layer.config),
        forked=layer_reads.forked_random_states(layer.config),
        may_have_gradients=layer_reads.may_have_gradients(layer),
        is_well_known=layer_reads.is_well_known(layer),
        first_run=layer_reads.first_run(layer),
    )
    return LayerSpec(
        module=layer, number=number, attributes=layer_reads.attributes_read, rerun=rerun,
        on_run_without_grad=on_run_without_grad,
    )  # fmt: skip


class CheckpointedSegments:
    """Groups for full recomputation: the inputs that a block's ``CheckpointFunction`` saves, segment by segment.

    Megatron saves a segment's input outside any layer's boundary, right after the segment's layers have run without
    gradients: these runs show the segment's layers. Its site is its first layer's, ``layers.N/checkpoint/0``.
    """

    def __init__(self, saved_tensors: SavedTensors, positions: dict[int, LayerPosition]) -> None:
        self._manager = saved_tensors.manager
        self._saved_tensors = saved_tensors
        self._positions = positions
        self._layers: list[int] = []
        self._group: Group | None = None
        self._num_saved = 0

    def on_run(self, layer: int) -> None:
        """Note that ``layer`` runs without gradients."""
        if self._group is not None:  # the last segment is complete: this layer begins the next one
            self._end_segment()
        self._layers.append(layer)

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """Return a context around a block's checkpointed forward."""
        if not torch.is_grad_enabled():
            yield
            return
        self._layers.clear()
        self._group = None
        with self._saved_tensors.hooks(self._next):
            yield
        self._end_segment()

    def _next(self) -> tuple[Group, Site] | None:
        if not self._layers:
            return None
        if self._group is None:
            self._group = self._manager.begin_forward(self._layers[0], self._positions[self._layers[-1]])
        site = Site(self._layers[0], CHECKPOINT_PATH, self._num_saved)
        self._num_saved += 1
        return self._group, site

    def _end_segment(self) -> None:
        if self._group is not None:
            self._manager.end_forward(self._group)
        self._group = None
        self._layers.clear()
        self._num_saved = 0


# A block's method for full recomputation, in megatron-core before 0.18 and in subclasses of mcore-bridge. From 0.18 on
# Megatron's block calls a function instead, which a patch reaches.
OWN_CHECKPOINTED_FORWARD = "_checkpointed_forward"


def has_own_checkpointed_forward(block: nn.Module) -> bool:
    """Return whether full recomputation of ``block`` is a method of its own."""
    return hasattr(block, OWN_CHECKPOINTED_FORWARD)


def _check_modules(patterns: Sequence[str], layers: Sequence[nn.Module]) -> None:
    """Refuse patterns that match no submodule of any of ``layers``."""
    paths = {path for layer in layers for path, _ in layer.named_modules() if path and not path.endswith("_bda")}
    present = paths | {OWN_PATH, CHECKPOINT_PATH}
    for pattern in patterns if layers else ():
        if not any(matches(pattern, path) for path in present):
            raise UsageError(
                f"--swap-modules {pattern!r}: no layer of this model has such a submodule. "
                f"It has: {', '.join(sorted(present))}."
            )

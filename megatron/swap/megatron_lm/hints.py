"""Hints about a model of Megatron, for a run: they follow from the facts of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core import parallel_state
from torch import nn

from megatron.swap.common.plan import Infeasible, Model, check_model
from megatron.swap.common.settings import Settings
from megatron.swap.devices.base import Device
from megatron.swap.engine.build import Engine
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.wrapper_tensors import WrapperRules
from megatron.swap.forecast.facts import MegatronFacts, has_sum_in_loss, model_of
from megatron.swap.megatron_lm import accumulators
from megatron.swap.megatron_lm.built_model import blocks_of, with_batch
from megatron.swap.megatron_lm.checks import recompute_kinds
from megatron.swap.megatron_lm.fp8_weights import recompute_weights
from megatron.swap.megatron_lm.layer import MegatronLayers, check_one_stack, check_stacks, has_own_checkpointed_forward
from megatron.swap.megatron_lm.layer_checkpoint import can_recompute_layers
from megatron.swap.megatron_lm.memory_needs import MemoryCheck, least_host_bytes
from megatron.swap.megatron_lm.model_patches import refuse_fusion
from megatron.swap.megatron_lm.optimizer_swap import OptimizerSwap, offload_settings
from megatron.swap.megatron_lm.producers import Producers
from megatron.swap.megatron_lm.quantized import wrapper_rules
from megatron.swap.megatron_lm.run_loss import RunLoss
from megatron.swap.megatron_lm.shared_patches import SHARED
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.models.hints import Errors, ModelHints, Undo
from megatron.swap.patches import linear_weight_gradients, registry


@dataclass(frozen=True)
class Built:
    """A model that exists already."""

    chunks: list[nn.Module]  # on this rank, without wrappers
    optimizer: Any  # or None
    is_wrapped: bool  # for data parallelism


class MegatronHints(ModelHints):
    """Answers about a model of Megatron. Without ``built``, the trainer builds the model, and has patched Megatron."""

    remedy = ""  # Megatron's flags
    tells_details = True
    waits_between_steps = True  # Megatron clips gradients

    def __init__(
        self, facts: MegatronFacts, settings: Settings, memory: MemoryCheck, built: Built | None = None
    ) -> None:
        super().__init__(None, ())
        self.facts = facts  # as far as they are known now
        self.lacks_fusion = False  # gradients would be lost if gradient accumulation were fused
        self.recomputes_layers = can_recompute_layers(facts)
        self.timeout_minutes = facts.distributed_timeout_minutes
        self.capacity, self.needs = memory.capacity, memory.line
        self._loss = RunLoss(settings, self.describe, lambda: has_sum_in_loss(self.facts))
        self._fp8_weights = settings.chosen_fp8_weights
        self._offloads_state = bool(settings.offload_fraction)
        self._built = built
        self._engine: Engine | None = None
        self._bound: MegatronLayers | None = None
        if built is not None:
            self.chunks = built.chunks

    @property
    def num_layers(self) -> int:
        return self.facts.num_layers

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return tuple(layer for chunk in self.chunks for block in blocks_of(chunk) for layer in block.layers)

    def describe(self) -> Model:
        return model_of(self.facts, self._fp8_weights)

    def kinds(self, settings: Settings) -> tuple[str, ...]:
        return recompute_kinds(self.facts, settings)

    def least_host_bytes(self, settings: Settings) -> int:
        return least_host_bytes(settings, self.facts)

    def wrappers(self) -> WrapperRules | None:
        return wrapper_rules() if self.facts.fp8 or self.facts.fp4 else None

    def state_store(
        self, settings: Settings, device: Device, num_micro_batches: Callable[[], int], host_bytes: int,
        disk: DiskFile | None,
    ) -> OptimizerSwap:  # fmt: skip
        return OptimizerSwap(device, offload_settings(settings, self.facts, host_bytes, disk), num_micro_batches)

    def uses(self, chunks: Sequence[nn.Module], optimizer: Any) -> bool:
        """Return whether one of ``chunks`` swaps by this run, or it offloads the state of ``optimizer``."""
        is_mine = self._built is not None and optimizer is not None and optimizer is self._built.optimizer
        return (self._offloads_state and is_mine) or any(chunk is mine for chunk in chunks for mine in self.chunks)

    # ------------------------------------------------------------------- when the model is there

    def prepare(self, chunks: Sequence[nn.Module], settings: Settings) -> Iterator[tuple[list[Undo], str | None]]:
        """Change the model, or raise a ``UsageError`` or ``PatchError``. Yield each change's undos, and a line."""
        if self._built is not None:
            own = [has_own_checkpointed_forward(block) for chunk in chunks for block in blocks_of(chunk)]
            applied = SHARED.add(self, self.facts, settings, self.kinds(settings), patches_full=not all(own))
            yield [partial(SHARED.remove, self)], None
            yield from (([], line) for line in registry.lost_features(applied.left_out))
            self.lacks_fusion = any(misfit.patch is linear_weight_gradients.PATCH for misfit in applied.left_out)
        if self._built is None or not self._built.is_wrapped:  # else the wrapper holds the nodes already
            for chunk in chunks if settings.acts or settings.offload_fraction else ():
                # They only have to be held until everything is closed.
                yield [accumulators.hold_grad_accumulators(chunk).clear], None
        if settings.acts:
            check_stacks(chunks)
        if settings.auto:
            check_one_stack(chunks)
        if self.lacks_fusion:
            refuse_fusion(chunks)
        for chunk in chunks:
            yield [self._loss.attach(chunk)], None
            if settings.recomputes_fp8_weights:
                yield [recompute_weights(chunk)], None

    def bound(
        self, engine: Engine, policy: Policy, settings: Settings, errors: Errors, is_measuring: Callable[[], bool],
        has_room: Callable[[int], bool],
    ) -> MegatronLayers:  # fmt: skip
        producers = None if engine.recomputer is None else Producers(engine.recomputer, self.kinds(settings))
        self._engine = engine
        self._bound = MegatronLayers(engine.saved_tensors, policy, settings.modules, producers, errors)
        return self._bound

    def unbound(self) -> None:
        self._engine = self._bound = None

    def forget_model(self) -> None:
        super().forget_model()
        self._built = None

    def pipeline_rank(self) -> int:
        return int(parallel_state.get_pipeline_model_parallel_rank())

    def first_forward(self, arguments: Sequence[Any], options: Mapping[str, Any], settings: Settings) -> None:
        """Note the size of the batch. Raises a ``UsageError`` if the plan is another model's."""
        self.facts = with_batch(self.facts, arguments, options)
        if (plan := settings.plan) is not None:
            check_model(plan, self.describe(), f"plan {plan.file}")

    def step_line(self, budget_gib: float | None) -> str | None:
        return self._loss.step_ended(budget_gib)

    def explained(self, error: Infeasible, budget_gib: float) -> Infeasible:
        return error  # it names Megatron's flags

    # ------------------------------------------------------------------- called by patched functions

    def around_checkpointed_forward(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return the context for the forward of ``block``, which may be another model's, with full recomputation."""
        return nullcontext() if self._bound is None else self._bound.around_checkpointed_forward(block)

    def recomputer(self) -> Recomputer | None:
        """Return the recomputer of this rank; None before the model is built, or if nothing is recomputed."""
        return None if self._engine is None else self._engine.recomputer

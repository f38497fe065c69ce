"""The offloaded optimizer state of one rank: its choice, its memory limits, and its statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import is_te_min_version
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.swap.common.disk_buffers import BLOCK_BYTES
from megatron.swap.common.rounding import ceil_div
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB, MIB, format_bytes
from megatron.swap.devices.base import Device
from megatron.swap.engine.overrides import in_backward
from megatron.swap.forecast.facts import MegatronFacts, state_bytes_of
from megatron.swap.forecast.states import STATE_HOST_FRACTION, bucket_bytes_before_disk
from megatron.swap.megatron_lm.optimizer_adapter import (
    AdaptedOptimizer,
    copier_to_model,
    is_elementwise,
    main_params_of,
    tables_of,
    unchained,
)
from megatron.swap.megatron_lm.scaled_state import scaled_names, types_of
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_arena import HostArena
from megatron.swap.optimizer.overlap import StepOverlap
from megatron.swap.optimizer.param_state import MAIN, OffloadedTensor, ParamState
from megatron.swap.optimizer.selection import StateSelection
from megatron.swap.optimizer.state_memory import StateMemory
from megatron.swap.optimizer.stepper import OptimizerStepper, StepOptions
from megatron.swap.optimizer.transfers import StateTransfers
from megatron.swap.planner.profile import BUCKET_BYTES, OffloadedState
from megatron.swap.reporting.summary import RankReport

MAX_TENSORS = 3  # offloaded tensors of one parameter: its main values and two moments


class ExpectedState(NamedTuple):
    """Estimate of the optimizer state before it is created."""

    num_sharers: int  # ranks that share the state of a parameter
    num_expert_sharers: int  # the same for experts' parameters; a lower bound
    state_bytes: int  # most bytes of state per element of a parameter

    def bytes_of(self, param: torch.Tensor) -> int:
        """Return the bytes of state on this rank for a model parameter. Megatron marks experts' by ``allreduce``."""
        num_sharers = self.num_sharers if getattr(param, "allreduce", True) else self.num_expert_sharers
        return ceil_div(param.numel() * self.state_bytes, num_sharers)


@dataclass(frozen=True)
class OffloadSettings:
    """Settings of optimizer-state offload."""

    fraction: float  # of all state, 0 to 1
    host_limit_bytes: int  # most host memory for state
    min_bytes: int = 0  # the state of smaller parameters stays on the device
    disk: DiskFile | None = None  # holds state that does not fit into host memory
    # If given, limits the fraction to the state of this size that fits beside activations. None makes too little room
    # an error.
    expected: ExpectedState | None = None


class OptimizerSwap:
    """Offloads the optimizer state of one rank.

    Megatron creates main parameters (``on_main_param_created``), then the optimizer (``attach``). In training, hooks on
    the layers (``watch``) show when device memory is free. ``num_micro_batches`` returns the number of the current
    step.
    """

    def __init__(
        self, device: Device, settings: OffloadSettings, num_micro_batches: Callable[[], int] = get_num_microbatches
    ) -> None:
        host_limit_bytes, disk = settings.host_limit_bytes, settings.disk
        if settings.expected is not None:
            host_limit_bytes = int(STATE_HOST_FRACTION * host_limit_bytes)
        self._device = device
        self._settings = settings
        self._num_micro_batches = num_micro_batches
        self._arena = HostArena(limit_bytes=host_limit_bytes, pinned=device.torch_device.type == "cuda")
        self._memory = StateMemory(self._arena, disk)
        bucket_bytes = BUCKET_BYTES if disk is None else bucket_bytes_before_disk(host_limit_bytes)
        self._transfers = StateTransfers(device, self._memory, bucket_bytes)
        self._overlap = StepOverlap(device, self._transfers)
        self._selection = StateSelection(settings.fraction, settings.min_bytes)
        self._expected_sizes: list[int] = []
        self._created: dict[torch.Tensor, ParamState | None] = {}  # None: its values are on the device
        self._adapted: list[AdaptedOptimizer] = []
        self._hooks: list[RemovableHandle] = []
        self._num_forwards: dict[nn.Module, int] = {}  # of each layer in this step
        self._has_backward = True  # of the chunk that runs

    # ------------------------------------------------------------ construction

    def watch(self, chunk: nn.Module) -> None:
        """Overlap copies with the layers of this model chunk, and add its parameters to the expected state."""
        if self._settings.expected is not None:
            expected_bytes = self._settings.expected.bytes_of
            self._expected_sizes += [expected_bytes(param) for param in chunk.parameters() if param.requires_grad]
            self._selection.limit(self._sure_bytes() / max(1, sum(self._expected_sizes)))
        for block in (module for module in chunk.modules() if isinstance(module, TransformerBlock)):
            for layer in block.layers:
                self._hooks.append(layer.register_forward_pre_hook(self._before_layer, with_kwargs=True))

    def _sure_bytes(self) -> int:
        """Return the bytes of the expected state that fit, whatever the order in which it is created."""
        num_tensors = MAX_TENSORS * len(self._expected_sizes)
        sure_bytes = self._arena.sure_bytes(num_tensors)
        if self._settings.disk is not None:
            # A tensor that does not fit into host memory goes to disk as a whole, in whole blocks.
            lost_bytes = max(self._expected_sizes, default=0) // 2 + num_tensors * BLOCK_BYTES
            sure_bytes += max(0, self._settings.disk.limit_bytes - lost_bytes)
        return sure_bytes

    def on_main_param_created(self, param: torch.Tensor) -> None:
        """Offload a newly created main parameter if it is chosen."""
        # At once, before Megatron creates the next: all main parameters together might not fit into device memory.
        is_chosen = self._selection.see(param)
        self._created[param] = self._transfers.offload_main_param(param) if is_chosen else None

    def attach(self, optimizer: Any) -> None:
        """Adapt a complete ``MegatronOptimizer``, or raise a ``UsageError`` for its class, or an error without room."""
        # A large parameter at the end leaves part of the fraction unused; smaller ones may still fit.
        for param, param_state in self._created.items():
            if param_state is None and self._selection.choose(param):
                self._created[param] = self._transfers.offload_main_param(param)
        for one in unchained(optimizer):
            self._adapt(one)

    def take_over(self, optimizer: Any) -> None:
        """Offload the state of an existing ``optimizer``. After an error, as of ``attach``, it has its state again."""
        try:
            for param in main_params_of(optimizer):
                self.on_main_param_created(param)
            self.attach(optimizer)
            for adapted in self._adapted:
                adapted.stepper.store_loaded()
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        """Put the state back on its device. The optimizer goes on without offload."""
        self._transfers.synchronize()
        param_states = [*self._param_states(), *filter(None, self._created.values())]
        for adapted in self._adapted:
            adapted.remove()
        self._adapted.clear()
        self._created.clear()
        for param_state in param_states:
            has_moments = any(shard.has_state for shard in param_state.shards)
            for name, offloaded in param_state.tensors.items():
                if name == MAIN or has_moments or name in param_state.wrappers:
                    offloaded.materialize()
                    offloaded.tensor.data = offloaded.tensor.data.to(offloaded.device, copy=True)

    def _adapt(self, optimizer: Any) -> None:
        inner = optimizer.optimizer
        has_disk = self._settings.disk is not None
        may_slice = is_elementwise(inner, has_disk=has_disk)
        options = StepOptions(
            may_slice, copier_to_model(optimizer), self._overlap.note_room, tables_of(inner),
            functools.partial(types_of, inner) if scaled_names(inner) else None,
        )  # fmt: skip
        # First the stepper, which stores the optimizer's own step, then ``install``, which replaces that step.
        stepper = OptimizerStepper(inner, self._transfers, self._chosen(inner), options)
        if stepper.state.offloaded:
            adapted = AdaptedOptimizer(optimizer, stepper)
            adapted.install()
            self._adapted.append(adapted)
            self._overlap.add(stepper)

    def _chosen(self, inner: torch.optim.Optimizer) -> dict[torch.Tensor, ParamState]:
        """Return the states to offload, by parameter."""
        others = [param for group in inner.param_groups for param in group["params"] if param not in self._created]
        chosen = {param for param in others if self._selection.see(param)}
        chosen |= {param for param in others if param not in chosen and self._selection.choose(param)}
        # A main parameter's values are offloaded, too. A parameter of the model offloads its moments alone.
        created = {param: one for param, one in self._created.items() if one is not None}
        return created | {param: ParamState(param) for param in chosen}

    # ---------------------------------------------------------------- training

    def chunk_begins(self) -> None:
        """Note that the forward of a chunk begins."""
        # A layer cannot tell: with full recomputation its first forward has no gradients in any pass.
        self._has_backward = torch.is_grad_enabled()

    def _before_layer(self, layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not layer.training or not self._has_backward:
            self._overlap.release_offloaded()
        elif not in_backward():  # else it is a recomputation
            num_forwards = self._num_forwards[layer] = self._num_forwards.get(layer, 0) + 1
            self._overlap.on_layer_forward(is_first_micro_batch=num_forwards == 1)
            hidden_states = options.get("hidden_states", arguments[0] if arguments else None)
            is_last = num_forwards == self._num_micro_batches()
            if is_last and isinstance(hidden_states, torch.Tensor) and hidden_states.requires_grad:
                # The gradient of a layer's input is the last that its backward computes.
                hidden_states.register_hook(lambda _: self._overlap.on_layer_backward_end())

    def step_ended(self, *, overlaps: bool, is_same_plan: bool) -> None:
        """End a step. ``overlaps``: with the next step's layers. ``is_same_plan``: these will use as much memory."""
        self._num_forwards.clear()
        self._overlap.step_ended()
        if not is_same_plan:
            self._overlap.forget_level()
        self._overlap.is_enabled = overlaps

    def set_offload_fraction(self, fraction: float) -> None:
        """Offload ``fraction`` of the state, at most the first one, between steps. State on disk returns first."""
        wanted = self._selection.choose_again(self._param_states(), fraction)
        for adapted in self._adapted:
            adapted.stepper.set_offloaded(wanted)

    def _param_states(self) -> list[ParamState]:
        return [param_state for adapted in self._adapted for param_state in adapted.stepper.state.param_states]

    # -------------------------------------------------------------- statistics

    def offloaded_state(self) -> OffloadedState:
        """Return the planner's measurements of the state, after synchronizing the device."""
        self._device.synchronize()
        if not self._selection.offloaded_bytes:
            return OffloadedState(0.0, 0.0, 0.0)
        fraction = self._selection.offloaded_fraction
        update_ms = sum(adapted.stepper.update_ms() for adapted in self._adapted)
        param_states = self._param_states()
        state_bytes = sum(one.num_bytes for one in param_states)
        disk_gib = sum(one.num_bytes for one in param_states if one.disk_bytes) / GIB
        # A step reads and writes each byte on disk. The disk's speed is the average since the last call.
        moved_gib = 2 * sum(one.disk_bytes for one in param_states) / GIB
        disk = self._settings.disk
        disk_ms = 0.0 if disk is None else moved_gib * disk.traffic.take_ms_per_gib()
        requantized_gib = sum(adapted.requantized_bytes() for adapted in self._adapted) / GIB
        return OffloadedState(
            state_bytes / fraction / GIB, fraction, update_ms / fraction, disk_gib, disk_ms,
            requantized_gib=requantized_gib / fraction,
        )  # fmt: skip

    @property
    def reserved_bytes(self) -> int:
        """Host bytes reserved for state and for disk buffers."""
        return self._arena.reserved_bytes

    @property
    def needed_bytes(self) -> int:
        """Most host bytes for state and disk buffers, with the moments that the next step may create."""
        sizes = [size for adapted in self._adapted for size in adapted.sizes_to_create()]
        return self._arena.reserved_bytes + self._arena.most_bytes(sizes)

    @property
    def kept_bytes(self) -> int:
        """Device bytes of state that could be offloaded and is kept."""
        return sum(adapted.stepper.state.kept_bytes for adapted in self._adapted)

    def offloaded_tensors(self) -> list[OffloadedTensor]:
        """Return every tensor that is offloaded now."""
        return [tensor for adapted in self._adapted for tensor in adapted.stepper.state.offloaded_tensors()]

    def summary_line(self) -> str:
        """Return a log line with the offloaded bytes in host memory and on disk."""
        states = [adapted.stepper.state for adapted in self._adapted]
        num_params = sum(len(state.offloaded) for state in states)
        if not num_params:
            return (
                f"--swap-optimizer {self._settings.fraction:g}: no state is offloaded, since no parameter is as large "
                "as --swap-min-mib, or the fraction is smaller than any parameter"
            )
        disk_bytes = self._memory.disk_bytes
        host_bytes = sum(state.offloaded_bytes for state in states) - disk_bytes
        places = {"in host memory": host_bytes, "on disk": disk_bytes}
        sizes = ", ".join(f"{place}: {format_bytes(num_bytes)}" for place, num_bytes in places.items() if num_bytes > 0)
        return f"optimizer state of {num_params} parameters is offloaded, {sizes}"

    def report_to(self, report: RankReport) -> None:
        """Set the optimizer's fields of the run's report."""
        report.optimizer_host_bytes = self.reserved_bytes
        report.optimizer_disk_bytes = self._memory.disk_bytes
        report.optimizer_out_bytes, report.optimizer_in_bytes = self.moved_bytes

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes offloaded and reloaded since the start."""
        return self._transfers.out_bytes, self._transfers.in_bytes

    # --------------------------------------------------------------------- end

    def abandon(self) -> None:
        """Remove the adapters without waiting, after a failure. Methods that save stay: a script may still save."""
        for adapted in self._adapted:
            adapted.remove(lambda method: method.is_for_saving)
        self._remove_hooks()

    def close(self) -> None:
        """Remove the adapters. State stays materialized, to be saved. Raises a ``DiskError`` if a write failed."""
        try:
            for adapted in self._adapted:
                adapted.stepper.materialize()
        finally:
            for adapted in self._adapted:
                if adapted.stepper.state.offloaded:  # a checkpoint reads state in host memory by these methods
                    adapted.remove(lambda method: method.reads_host)
                else:
                    adapted.remove()
            self._remove_hooks()
            self._device.synchronize()
            self._arena.close()

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def offload_settings(
    settings: Settings, facts: MegatronFacts, host_limit_bytes: int, disk: DiskFile | None
) -> OffloadSettings:
    """Return the settings of a run with ``host_limit_bytes`` for state on the host, and ``disk`` for the rest."""
    expected = expected_state(facts) if settings.plans_optimizer else None
    return OffloadSettings(settings.offload_fraction, host_limit_bytes, int(settings.min_mib * MIB), disk, expected)


def expected_state(facts: MegatronFacts) -> ExpectedState:
    """Return the expected optimizer state, from Megatron's arguments."""
    num_ranks = num_expert_ranks = 1
    if facts.use_distributed_optimizer:
        # Data- and context-parallel ranks share one optimizer; each of several instances has a copy of all state.
        of_shards = facts.data_parallel_size * facts.context_parallel_size // facts.num_distributed_optimizer_instances
        of_experts = facts.expert_model_parallel_size * facts.expert_tensor_parallel_size
        num_ranks, num_expert_ranks = of_shards, max(1, of_shards * facts.tensor_model_parallel_size // of_experts)
    state_bytes = state_bytes_of(facts)
    if facts.use_precision_aware_optimizer:
        has_remainders = facts.bf16 and facts.fp8_recipe in (None, "delayed") and is_te_min_version("2.1.0")
        main_bytes = min(facts.main_params_dtype.itemsize, 2 if has_remainders else 4)  # else stored in full
        state_bytes = main_bytes + facts.exp_avg_dtype.itemsize + facts.exp_avg_sq_dtype.itemsize
    return ExpectedState(num_ranks, num_expert_ranks, state_bytes)

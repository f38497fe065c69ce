"""Activation swapping around a plain PyTorch training loop: the layers that swap, and their figures."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import nn

from megatron.swap.common.settings import Settings
from megatron.swap.common.spelling import ACTIVATIONS
from megatron.swap.common.types import GIB, UsageError, format_bytes
from megatron.swap.engine.build import Engine
from megatron.swap.engine.oom_guard import Rescue
from megatron.swap.engine.overrides import NotCopied
from megatron.swap.engine.policy import Policy
from megatron.swap.layers.layers import Layers
from megatron.swap.layers.run import LayerSpec
from megatron.swap.memory.host_budget import HostMemoryBudget
from megatron.swap.run.build import RealMachine, build, real_machine
from megatron.swap.run.host_share import host_share
from megatron.swap.run.run_device import RunDevice


@dataclass(frozen=True)
class SwapStats:
    """Totals since the start.

    Attributes:
        out_bytes, in_bytes: copied to host memory, and back.
        stayed_bytes: copied but not released, because others referred to the tensor or it was changed.
        num_late: storages whose reload began only with their layer's backward. 0, but in steps that a planner measures,
            and where the prefetch window is smaller than what a layer offloads.
        wait_ms: time that compute waited for copies, as far as the device has run.
        held_bytes: offloaded now.
        host_peak_bytes: most bytes offloaded at once.
        host_booked_bytes: host memory that is reserved.
        num_rescues, rescued_bytes: failed allocations that succeeded after an eviction, and the bytes evicted for them.
        num_steps: training steps that have ended; 0 without a budget, since nobody counts them then.
        stage: ``profile``, ``search`` or ``stable`` while a planner decides; ``None``: none does.
        budget_gib: most device memory that a step may take; ``None``: there is no budget.
        predicted_gib, predicted_ms: peak and time of a step under the present plan; ``None``: there is no plan.
        peak_gib, step_ms: those of the last step, measured, the worst of all ranks; ``None``: not measured.
    """

    out_bytes: int
    in_bytes: int
    stayed_bytes: int
    num_late: int
    wait_ms: float
    held_bytes: int
    host_peak_bytes: int
    host_booked_bytes: int
    num_rescues: int = 0
    rescued_bytes: int = 0
    num_steps: int = 0
    stage: str | None = None
    budget_gib: float | None = None
    predicted_gib: float | None = None
    predicted_ms: float | None = None
    peak_gib: float | None = None
    step_ms: float | None = None

    def __str__(self) -> str:
        text = (
            f"{format_bytes(self.out_bytes)} out, {format_bytes(self.in_bytes)} in, {self.num_late} late, "
            f"{self.wait_ms:.1f} ms waited, at most {format_bytes(self.host_peak_bytes)} in host memory"
        )
        if self.budget_gib is not None:
            text += f"; {self.stage} within {format_bytes(self.budget_gib * GIB)}"
        if self.peak_gib is not None:
            text += f", last step {format_bytes(self.peak_gib * GIB)}"
        if self.predicted_gib is not None:
            text += f" (predicted {format_bytes(self.predicted_gib * GIB)})"
        return text


class SwappedActivations(NotCopied):
    """Layers whose activations are swapped, until ``close`` or the end of its ``with``. Made by ``activations``.

    Attributes:
        layers: all layers, in order. Layers that are not swapped have boundaries too, to follow forward and backward.
        chosen: numbers of the swapped layers.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        policy: Policy,
        settings: Settings,
        run_device: RunDevice,
        autocast_cache: bool = True,
    ) -> None:
        self.layers = tuple(layers)
        is_swapped = [policy.swaps_layer(number) for number in range(len(layers))]
        self.chosen = tuple(number for number, flag in enumerate(is_swapped) if flag)
        self._run_device = run_device
        share = host_share(settings, swaps=True)
        self._machine = real_machine(settings, run_device.device, share, HostMemoryBudget(share.total_bytes))
        engine = self._build(settings, policy, self._machine)
        self._manager, self._saved_tensors = engine.manager, engine.saved_tensors
        self._boundaries = self._put_boundaries(policy, autocast_cache)
        self._last: SwapStats | None = None
        self._rescues: list[Rescue] = []

    def _build(self, settings: Settings, policy: Policy, machine: RealMachine) -> Engine:
        return build(settings, policy, machine)

    def _put_boundaries(self, policy: Policy, autocast_cache: bool) -> Layers:
        layers = Layers(self._saved_tensors, policy, ACTIVATIONS.errors)
        layers.install([
            LayerSpec(module=module, number=number, autocast_cache=autocast_cache)
            for number, module in enumerate(self.layers)
        ])  # fmt: skip
        return layers

    def stats(self) -> SwapStats:
        """Return the totals until now, or until ``close``. Never waits for the device."""
        return self._last or self._figures()

    def _figures(self) -> SwapStats:
        counters, host = self._manager.counters, self._machine.pool.stats
        self._rescues += self._manager.guard.take_rescues()
        totals = counters.totals()
        stayed_bytes = sum(layer.stayed_bytes for layer in counters.layers.values())
        return SwapStats(
            totals.out_bytes, totals.in_bytes, stayed_bytes, totals.num_late, totals.wait_ms,
            host.leased_bytes, host.leased_peak_bytes, host.reserved_bytes,
            len(self._rescues), sum(rescue.freed_bytes for rescue in self._rescues),
        )  # fmt: skip

    def close(self) -> None:
        """Restore the layers' own forward and release host memory. A second call does nothing.

        Call it after the last backward: a backward whose saved tensors are still offloaded raises an error.

        Raises:
            RuntimeError: a copy on the GPU has failed. Host memory is released all the same.
        """
        if self._last is not None:
            return
        self._boundaries.remove()
        try:
            self._manager.drain()  # before the figures: afterwards every wait is measured
        finally:
            self._last = self._figures()
            self._machine.tier.close()

    def __enter__(self) -> Self:
        if self._last is not None:  # else a second ``with`` would train without swapping
            raise UsageError("this swap.activations(...) is closed: call swap.activations(model, ...) again.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

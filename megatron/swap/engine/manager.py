"""The activation engine's sequence of work at the beginning and end of each layer's forward and backward.

Copies run on two lanes and are ordered by events. ``offload.py`` and ``reload.py`` document their waits.

A manager serves one training thread. Autograd's device threads call it too, but only while that thread waits in
``backward``. Finalizers run on any thread: ``Handle.__del__`` says which objects they may touch.
"""

from __future__ import annotations

import weakref

from megatron.swap.common.counters import Counters
from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.types import LayerPosition
from megatron.swap.devices.base import Device
from megatron.swap.engine.collector import begin_delay, end_delay
from megatron.swap.engine.decider import Decider
from megatron.swap.engine.function_transforms import untransformed
from megatron.swap.engine.handle import Group
from megatron.swap.engine.offload import Offloader
from megatron.swap.engine.oom_guard import OomGuard
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.release_budget import ReleaseBudget
from megatron.swap.engine.reload import Reloader
from megatron.swap.engine.settings import EngineSettings, Instruments
from megatron.swap.engine.shared_state import SharedState
from megatron.swap.memory.tiers.base import Tier


class SwapManager:
    """Offloads and reloads storages. Nothing is evicted without ``guard``."""

    def __init__(
        self, device: Device, tier: Tier, policy: Policy, settings: EngineSettings | None = None,
        instruments: Instruments | None = None, guard: OomGuard | None = None,
    ) -> None:  # fmt: skip
        settings, instruments = settings or EngineSettings(), instruments or Instruments()
        self.guard = guard or OomGuard(device)
        self.release_budget = ReleaseBudget(settings.window_bytes)
        self.decider = Decider(policy, self.release_budget)
        self._state = state = SharedState(device, tier, instruments.ranges, self.guard, self.release_budget)
        weakref.finalize(self, end_delay).atexit = False  # dropped in mid-step
        self.offload = Offloader(state, self.decider, settings.verify, instruments.on_full)
        self.reload = Reloader(state, instruments.observer)

    @property
    def counters(self) -> Counters:
        """Counts of copies and waits since the start."""
        return self._state.counters

    @property
    def ranges(self) -> Ranges:
        """Ranges that name the engine's work for a profiler."""
        return self._state.ranges

    @untransformed
    def begin_forward(self, layer: int, position: LayerPosition) -> Group:
        """Begin the forward of ``layer``, at ``position`` in its chunk. Return the group of this run."""
        state = self._state
        state.main_stream = state.device.current_stream()
        state.free_orphans()
        state.find_evicted()
        self.offload.discard_unfinished()  # else a discarded graph's last group would still count as waiting
        self.collect_if_empty()
        group = state.order.begin_forward(layer, position)
        begin_delay()
        if state.ranges.is_on:
            group.micro_batch = state.ranges.micro_batch(layer)
        self.release_budget.begin_forward(layer, position)
        self.offload.begin_forward(group)
        return group

    @untransformed
    def end_forward(self, group: Group) -> None:
        """End the forward of the layer of ``group``: enqueue copies of its storages, and release older storages."""
        self.release_budget.end_accounting()
        self.offload.end_forward(group)
        self.release_budget.end_forward(group)
        if group.num_bytes:
            self.counters.layers[group.key.layer].num_groups += 1
        self.offload.release()
        self.ranges.memory()
        if group.position.num_after == 0 and not group.position.ends_in_loss:
            # A backward follows on this pipeline stage, or a forward that gives time for a prefetch.
            self.reload.prefetch()

    @untransformed
    def begin_backward(self, group: Group) -> None:
        """Begin the backward of ``group``: reload its missing storages, prefetch the groups that follow. Idempotent."""
        self.reload.begin_backward(group)

    def collect_if_empty(self) -> None:
        """Let Python collect garbage again if no group is left whose backward has not begun."""
        if self._state.order.is_empty:
            end_delay()

    def apply_policy(self, window_bytes: int | None) -> None:
        """Forget learned sizes and refusals: the policy changes. Call it between steps, with no group in flight."""
        self.release_budget.apply_policy(window_bytes)
        self.decider.apply_policy()

    def drain(self) -> None:
        """Wait for all copies, and forget them, at the end. A graph that lives on cannot reload its storages."""
        end_delay()
        self.reload.close()
        self.guard.end()
        self._state.device.close()
        self.offload.discard_unfinished()
        self._state.offloading.clear()
        self._state.fences.clear()
        self._state.orphans.clear()

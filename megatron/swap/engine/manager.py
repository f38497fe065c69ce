"""The activations' engine: what happens at the beginning and the end of each layer's forward and backward.

``offload.py`` copies storages to the tier and releases their memory, ``reload.py`` brings them back ahead of backward,
``evict.py`` follows what the out-of-memory guard takes. All three order their copies with events, on two streams of
their own; each says which of its waits is for what.

A manager serves one training thread. Autograd's device threads call it too, but only while that thread waits in
``backward``; finalizers run anywhere and touch nothing here but a slot's ``free`` (see ``Handle``).
"""

from __future__ import annotations

from megatron.swap.common.counters import Counters
from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.types import LayerPosition
from megatron.swap.devices.base import Device
from megatron.swap.engine.decider import Decider
from megatron.swap.engine.evict import Evictions
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
    """Offloads and reloads storages.

    Args:
        device: streams, events and memory.
        tier: where bytes go.
        policy: what is kept, offloaded or recomputed.
        settings, instruments: see there.
        guard: may evict what is not used when an allocation fails; ``None``: nothing is evicted.

    Attributes:
        decider: asks the policy.
        offload, reload: what saved tensors are handed to, and come from.
        guard: as given, or one that never begins.
    """

    def __init__(
        self,
        device: Device,
        tier: Tier,
        policy: Policy,
        settings: EngineSettings | None = None,
        instruments: Instruments | None = None,
        guard: OomGuard | None = None,
    ) -> None:
        settings, instruments = settings or EngineSettings(), instruments or Instruments()
        self.guard = guard or OomGuard(device)
        self.release_budget = ReleaseBudget(settings.window_bytes)
        self.decider = Decider(policy, self.release_budget)
        self._state = state = SharedState(device, tier, instruments.ranges, self.guard, self.release_budget)
        self._evictions = Evictions(state)
        self.offload = Offloader(state, self._evictions, self.decider, settings.verify, instruments.on_full)
        self.reload = Reloader(state, self._evictions)

    @property
    def counters(self) -> Counters:
        """What was copied and waited for since the start."""
        return self._state.counters

    @property
    def ranges(self) -> Ranges:
        """Names the engine's work for a profiler."""
        return self._state.ranges

    def begin_forward(self, layer: int, position: LayerPosition) -> Group:
        """``layer`` begins, which stands at ``position`` in its chunk. Return the group of this run."""
        state = self._state
        state.main_stream = state.device.current_stream()
        state.free_orphans()
        self._evictions.find_evicted()
        self.offload.discard_unfinished()  # else a discarded graph's last group would seem to wait for its backward
        group = state.order.begin_forward(layer, position)
        if state.ranges.is_on:
            group.micro_batch = state.ranges.micro_batch(layer)
        self.release_budget.begin_forward(layer, position)
        self.offload.begin_forward(group)
        return group

    def end_forward(self, group: Group) -> None:
        """The layer of ``group`` has ended: copies of what it saved are enqueued, older ones are released."""
        self.release_budget.end_accounting()
        self.offload.end_forward(group)
        self.release_budget.end_forward(group)
        if group.num_bytes:
            self.counters.layers[group.key.layer].num_groups += 1
        self.offload.release()
        self.ranges.memory()
        if group.position.num_after == 0 and not group.position.ends_in_loss:
            # A pipeline stage goes on with a backward, or with a forward that gives time for a prefetch.
            self.reload.prefetch()

    def begin_backward(self, group: Group) -> None:
        """The backward of ``group`` begins: reload what of it is missing, prefetch what follows. Idempotent."""
        self.reload.begin_backward(group)

    def apply_policy(self, window_bytes: int | None) -> None:
        """The policy answers otherwise from the next forward on: forget the sizes and refusals that were learned.

        Between steps: no group may be in flight.

        Args:
            window_bytes: as in ``EngineSettings``.
        """
        self.release_budget.apply_policy(window_bytes)
        self.decider.apply_policy()

    def drain(self) -> None:
        """Training is over, or broke off: wait for every copy, then forget what was in flight.

        A graph that is there still has what is on the device; it cannot reload what is not.
        """
        self.reload.close()
        self.guard.end()
        self._state.device.close()
        self.offload.discard_unfinished()
        self._state.offloading.clear()
        self._state.fences.clear()
        self._state.orphans.clear()

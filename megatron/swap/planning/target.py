"""Target of a run that plans itself, and the parts of the run that the planner measures and switches."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from megatron.swap.common.plan import Model
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import MIB
from megatron.swap.devices.base import Device
from megatron.swap.engine.oom_guard import OomGuard
from megatron.swap.layers.layers import Layers
from megatron.swap.memory.tiers.base import Tier
from megatron.swap.planner.profile import OffloadedState
from megatron.swap.planner.schedule import most_micro_batches
from megatron.swap.planning.state_machine import SETTLING_STEPS, SearchLimits
from megatron.swap.planning.switch import SafePolicy, SwitchingPolicy
from megatron.swap.profiling.footprint import FootprintMeter
from megatron.swap.profiling.recorder import Recorder

OVERLAP_STEPS = 1
"""Additional settling steps with offloaded optimizer state: buckets are prefetched once the memory of the layers is
known, and offloaded beside the forward after that."""


@dataclass(frozen=True)
class PlanTarget:
    """Model, device and budget, known before the model is built."""

    settings: Settings  # budget, limits of the search, files for plan and profile
    describe: Callable[[], Model]
    """Returns the shape of the whole model. A model that was built before shows its sequences' length in the first
    step."""
    device_gib: float  # memory of the device
    recompute: Collection[str]  # producers whose outputs may be recomputed
    recomputes_layers: bool = True  # whether whole layers may be recomputed
    timeout_minutes: float | None = None  # how long a rank waits for the others; None: torch's default
    remedy: str = ""  # advice if the model alone exceeds the budget; empty: Megatron's flags

    def __post_init__(self) -> None:
        self.settings.budget_gib(self.device_gib)  # Raises ``UsageError`` if the device has less memory than the budget

    @property
    def budget_gib(self) -> float:
        return self.settings.budget_gib(self.device_gib)

    @property
    def most_micro_batches(self) -> int:
        """Micro-batches of a step beyond which a step holds no more memory."""
        return most_micro_batches(self.describe().pipeline_parallel)

    @cached_property
    def policy(self) -> SwitchingPolicy:
        min_bytes = int(self.settings.min_mib * MIB)
        return SwitchingPolicy(SafePolicy(min_bytes, self.recompute), min_bytes)

    def search_limits(self, keeps_time: bool) -> SearchLimits:
        """Return the bounds of the search. ``keeps_time``: whether the device's times are meaningful."""
        return SearchLimits(
            self.budget_gib, self.settings.max_candidates, keeps_time, self.most_micro_batches,
            SETTLING_STEPS + self.settings.plans_optimizer * OVERLAP_STEPS,
        )  # fmt: skip


@dataclass(frozen=True)
class RunParts:
    layers: Layers  # the boundaries around the layers of this rank
    device: Device
    host_tier: Tier  # host memory, whose link is measured
    recorder: Recorder
    footprint: FootprintMeter  # counts the bytes that a step saves
    pipeline_rank: int  # this rank's stage of the pipeline
    num_micro_batches: Callable[[], int]  # of the current step
    host_bytes: Callable[[], int]  # that this rank may reserve for activations
    take_peak: Callable[[], tuple[int, int]]
    """Returns the most bytes held since the last call and now, where the device reports no reserved memory."""
    offloaded_state: Callable[[], OffloadedState | None] = lambda: None
    """Returns measurements of optimizer state that may be offloaded; None: the planner does not decide that."""
    set_offload_fraction: Callable[[float], None] = lambda _: None  # from the next step on
    guard: OomGuard | None = None  # is on while steps are measured; None: the planner does not switch it

"""Makes profiles of workloads: records steps, then times steps in which layers are recomputed whole."""

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from megatron.swap.common.types import GIB, OPERATOR, SwapError
from megatron.swap.planner.host_time import WHOLE_LAYER
from megatron.swap.planner.profile import Device, Link, Pipeline, Profile
from megatron.swap.planning.consensus import Ranks
from megatron.swap.planning.target import PlanTarget, RunParts
from megatron.swap.planning.workload import Step, Workload
from megatron.swap.profiling.footprint import Footprint
from megatron.swap.profiling.link_benchmark import measure_link, slowest_link
from megatron.swap.profiling.profile_builder import build_profile, trained_layers, with_recorded_times
from megatron.swap.profiling.recording import Recording


@dataclass(frozen=True)
class MeasuredWorkload:
    """Measurements of a workload on this rank, taken while it was recorded."""

    profile: Profile
    footprint: Footprint


class WorkloadProfiler:
    def __init__(self, target: PlanTarget, parts: RunParts, ranks: Ranks) -> None:
        self._target = target
        self._ranks = ranks
        self._parts = parts
        self._recorder = parts.recorder
        self.timer = parts.recorder.for_times()  # of times alone
        self._link: Link | None = None
        self._recorded = Footprint(())
        self._untimed: MeasuredWorkload | None = None  # recorded, and not taken yet
        self._timed: list[tuple[Step, Recording]] = []  # steps that were timed since
        self._measured: WeakKeyDictionary[Workload, MeasuredWorkload] = WeakKeyDictionary()

    def record(self, number: int) -> None:
        """Record the next step, ``number``, in addition to steps that are recorded already."""
        if not self._recorder.is_on:
            self._recorded, self._untimed = Footprint(()), None
            self._parts.device.release_cached()  # drop memory that trials and first uses have reserved
            self._recorder.start(number)

    def finish_recording(self, num_micro_batches: int) -> Profile:
        """Return the profile of the recorded steps, each of ``num_micro_batches``. Steps are timed from now on."""
        parts, target = self._parts, self._target
        recording = self._ranks.all_or_none(self._recorder.stop)  # before collectives that measure the link
        if self._link is None:
            self._link = slowest_link(parts.device, measure_link(parts.device, parts.host_tier))
        if any(parts.layers.chunks()) and not self._recorded.layers:
            raise SwapError(
                "while steps were recorded, none of this rank's layers ran: another function than their forward does "
                "their work, which is not swapped. Drop the budget, or what replaces their forward."
            )
        saving = {entry.layer for entry in self._recorded.layers if entry.num_tensors}  # frozen layers may save nothing
        saving &= trained_layers(recording)
        chunks = tuple(tuple(layer for layer in chunk if layer in saving) for chunk in parts.layers.chunks())
        model = target.describe()
        profile = build_profile(
            recording, model, self._link, Device(parts.device.name, target.device_gib),
            num_micro_batches=num_micro_batches,
            source=f"measured in {recording.num_steps} steps of a run with budget {target.budget_gib:g} GiB",
            host_gib=parts.host_bytes() / GIB, pipeline=Pipeline(model.pipeline_parallel, parts.pipeline_rank, chunks),
            min_mib=target.settings.min_mib, whole_layers=target.recomputes_layers,
        )  # fmt: skip
        profile = replace(profile, offloaded_state=parts.offloaded_state())
        self._untimed, self._timed = MeasuredWorkload(profile, self._recorded), []
        return profile

    def complete(self, footprint: Footprint, workload: Workload | None) -> Footprint:
        """Return the footprint of a step under ``workload``'s plan, with figures for layers that were not seen."""
        if workload is not None:
            return footprint.filled_from(self._measured[workload].footprint)
        if self._untimed is not None:
            return footprint.filled_from(self._untimed.footprint)
        if self._recorder.is_on:
            self._recorded = self._recorded.maximum(footprint)
        return footprint

    def step_ended(self, step: Step) -> None:
        if self.timer.is_on and self._untimed is not None:
            self.timer.step_ended(step.number + 1)
            self._timed.append((step, self.timer.stop()))

    def measured(self, workload: Workload) -> MeasuredWorkload:
        """Return the measurements of ``workload``. The first call takes those that were just made."""
        if self._untimed is not None:
            measured, self._untimed = self._untimed, None
            timed = [
                recording for step, recording in self._timed
                if step.num_micro_batches == measured.profile.num_micro_batches
                and workload.saves_as_much_as(replace(step, num_micro_batches=workload.num_micro_batches))
            ]  # fmt: skip
            # Elsewhere the host's time is not as planner/host_time.py says: nobody watches operators.
            of_host = OPERATOR in self._target.recompute and self._parts.device.keeps_time
            profile = with_recorded_times(measured.profile, timed, WHOLE_LAYER if of_host else None)
            self._measured[workload] = replace(measured, profile=profile)
        return self._measured[workload]

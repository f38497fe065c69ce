"""Steps of a model that no GPU has run: on the meta device, recorded like steps on a GPU."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.layer_ranges import format_ranges
from megatron.swap.common.plan import LAYER_SECTION, Plan, PlanClass
from megatron.swap.common.types import GIB, LINEAR, MIB, OPERATOR
from megatron.swap.devices.dry import DryDevice
from megatron.swap.dry.engine import dry_device, planned_layers
from megatron.swap.dry.mode import dry_run
from megatron.swap.engine.policy import ManualPolicy
from megatron.swap.forecast.gpus import Gpu
from megatron.swap.models.plannable import refuse_unplannable
from megatron.swap.planner.profile import Device, Link, Pipeline, Profile
from megatron.swap.planning.switch import SafePolicy, SwitchingPolicy
from megatron.swap.profiling.profile_builder import build_profile, trained_layers, with_recorded_times
from megatron.swap.profiling.recorder import Recorder
from megatron.swap.profiling.recording import Recording

# Repeat a step until the allocator reserves no more. Freed blocks lie differently in each step, so a single step may
# report too little.
MOST_STEPS = 5
# Runs one training step on the meta device: forward, loss, backward and the rest. Gradients that it leaves count as
# held throughout.
Step = Callable[[], None]


@dataclass(frozen=True)
class DryStep:
    """Time of a step, and the memory that the allocator has reserved behind it."""

    ms: float
    reserved_gib: float
    is_full: bool = False  # the device has less memory, or its allocator empties its cache in every step


def dry_step(model: nn.Module, step: Step, gpu: Gpu) -> DryStep:
    """Return time and memory of ``step`` of ``model``, as it is, on ``gpu``. Raises as ``dry_profile``."""
    device = dry_device(model, gpu)
    with dry_run(device, gpu):
        return _settled(device, step)


def dry_profile(
    model: nn.Module, step: Step, gpu: Gpu, *, part: nn.Module | None = None, host_gib: float | None = None,
    min_mib: float = 1.0, autocast_cache: bool = True,
) -> Profile:
    """Return the profile of ``step`` on ``gpu``, as ``swap.activations(model, memory_gib=…)`` would measure it.

    All parameters of ``model`` are on the meta device. ``step`` is called four times: the last two are recorded, and
    timed with all layers recomputed. It calls ``part``, the module to swap (by default ``model``), once. ``host_gib``
    limits host memory for activations. Raises a ``UsageError`` if the model cannot be planned, or its operators do not
    follow from shapes; a ``SwapError`` if no layer ran backward.
    """
    part = model if part is None else part
    refuse_unplannable(part)
    device = dry_device(model, gpu)
    recorder = Recorder(device, Ranges(), device.take_peak)
    timer = recorder.for_times()
    policy = SwitchingPolicy(ManualPolicy((), (), int(min_mib * MIB), (OPERATOR, LINEAR)), 0)  # keeps all else
    with planned_layers(part, device, policy, autocast_cache, recorder) as planned, ExitStack() as undo:
        recorder.add_chunk(part)
        undo.callback(part.register_forward_pre_hook(lambda chunk, _: recorder.chunk_begins(chunk)).remove)
        undo.callback(part.register_forward_hook(lambda chunk, *_: recorder.chunk_ends(chunk)).remove)
        undo.callback(recorder.abandon)
        undo.callback(timer.abandon)

        def recorded(by: Recorder) -> Recording:
            device.synchronize()  # a step begins with an idle device
            by.start(1)
            step()
            by.step_ended(2)
            return by.stop()

        with dry_run(device, gpu):
            step()  # makes gradients, and shows the order of the layers
            planned.learn_order(0)
            step()  # tries each operator once
            device.release_cached()  # as a run does
            recording = recorded(recorder)
            described = planned.describe(part)
            layers = tuple(sorted(trained_layers(recording)))
            profile = build_profile(
                recording, described, Link(gpu.link_gb_s, gpu.link_gb_s, gpu.link_both_gb_s, gpu.link_both_gb_s),
                Device(gpu.name, gpu.memory_gib), num_micro_batches=1, source=f"a dry run; {gpu.source}",
                host_gib=host_gib, pipeline=Pipeline(chunks=(layers,)), min_mib=min_mib, whole_layers=True,
            )  # fmt: skip
            repeatable = tuple(
                layer for entry in profile.layers for layer in entry.layers
                if any(section.name == LAYER_SECTION for section in entry.sections)
            )  # fmt: skip
            if not repeatable:
                return profile
            whole = PlanClass(format_ranges(repeatable), {}, (LAYER_SECTION,))
            policy.apply_plan(Plan(described, None, None, None, (whole,)))
            planned.apply_policy(None)
            return with_recorded_times(profile, [recorded(timer)], host_factor=1.0)


def dry_planned_step(
    model: nn.Module, step: Step, gpu: Gpu, plan: Plan, *, part: nn.Module | None = None, min_mib: float = 1.0,
    autocast_cache: bool = True, is_limited: bool = False,
) -> DryStep:
    """Return time and memory of ``step`` under ``plan``, on a device with the memory of ``gpu`` if ``is_limited``."""
    device = dry_device(model, gpu, is_limited)
    policy = SwitchingPolicy(SafePolicy(int(min_mib * MIB), (OPERATOR, LINEAR)), int(min_mib * MIB))
    part = model if part is None else part
    with planned_layers(part, device, policy, autocast_cache) as planned, dry_run(device, gpu):
        step()
        planned.learn_order(0)
        device.release_cached()
        policy.apply_plan(plan)
        planned.apply_policy(None if plan.prefetch_gib is None else int(plan.prefetch_gib * GIB))
        return _settled(device, step)


def _settled(device: DryDevice, step: Step) -> DryStep:
    """Run ``step`` until no more memory is reserved, at most ``MOST_STEPS`` times behind the first."""
    step()
    device.take_retries()
    for _ in range(MOST_STEPS):
        device.synchronize()  # a step begins with an idle device
        begin, reserved_bytes = device.mark(), device.reserved_bytes()
        step()
        num_retries = device.take_retries()
        if device.reserved_bytes() == reserved_bytes and not num_retries:
            break
    is_full = num_retries > 0 or device.peak_reserved_bytes() > device.capacity_bytes
    return DryStep(device.mark().elapsed_ms_since(begin), device.reserved_bytes() / GIB, is_full)

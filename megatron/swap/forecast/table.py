"""Formats predictions and memory as tables for people."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from megatron.swap.common.types import GIB, MemoryRow
from megatron.swap.forecast.options import Option
from megatron.swap.forecast.states import States, split_before_disk
from megatron.swap.planner.profile import BUCKETS_GIB, Profile
from megatron.swap.planner.simulate import Prediction
from megatron.swap.planner.state_fraction import copies_ms
from megatron.swap.planner.table import aligned, gib_text

LIBRARIES = "workspaces, stand-ins of fused gradients"


def memory_table(
    states: States, num_params: float, profile: Profile, prediction: Prediction, before_disk_gib: float | None = None,
    measured: Sequence[MemoryRow] = (),
) -> str:  # fmt: skip
    """Return the predicted memory of each kind on each tier at the device's peak, beside the ``measured`` memory.

    ``before_disk_gib`` is host memory of the rank; offloaded bytes beyond it go to disk. None: there is no disk.
    """
    offloaded_gib = states.offloaded_gib(num_params)
    host_gib = float("inf") if before_disk_gib is None else before_disk_gib
    split = split_before_disk(offloaded_gib, host_gib, prediction.host_gib)
    buffers_gib = 0.0 if before_disk_gib is None else split.buffers
    libraries_gib = profile.static_gib - states.device_gib(num_params)
    fragments_gib = max(profile.fragments_gib, prediction.fragments_gib)
    activations_gib = prediction.peak_gib - profile.static_gib - fragments_gib
    predicted: dict[str, tuple[tuple[float, ...], str]] = {
        "weights": ((states.weights_gib(num_params), 0, 0),
                    f"{num_params / 1e9:.2f} billion on this rank{'; FP8 and its caches' if states.fp8_bytes else ''}"),
        "gradients": ((states.gradients_gib(num_params), 0, 0), ""),
        "optimizer": ((states.kept_gib(num_params), split.state_in_host, split.state_on_disk),
                      f"{states.offload_fraction:.0%} of it is offloaded; its step takes {BUCKETS_GIB:g} GiB of "
                      "buckets, once activations are gone" if states.offload_fraction else ""),
        "libraries": ((libraries_gib, 0, 0), f"{LIBRARIES}; measured as activations" if measured else LIBRARIES),
        "activations": ((activations_gib, split.activations_in_host, split.activations_on_disk),
                        f"with temporaries, {prediction.peak_at}"),
        "buffers": ((0, buffers_gib, 0), "between disk and device" if buffers_gib else ""),
        "fragments": ((fragments_gib, 0, 0),
                      "" if fragments_gib else "not known without a measurement"),
    }  # fmt: skip
    found: dict[str, tuple[float, ...]] = {
        row.kind: (row.device_bytes / GIB, row.host_bytes / GIB, row.disk_bytes / GIB) for row in measured
    }
    predicted["together"] = _sums([gib for gib, _ in predicted.values()]), ""
    if measured:
        found["together"] = _sums(list(found.values()))
    head = [cell for tier in ("device", "host", "disk") for cell in (f"{tier} GiB", "measured")]
    table = [("memory", *head, "")]
    for kind, (gib, why) in predicted.items():
        beside = [f"{one:.2f}" for one in found[kind]] if kind in found else [""] * len(gib)
        pairs = zip((f"{one:.2f}" for one in gib), beside, strict=True)
        table.append((kind, *(cell for pair in pairs for cell in pair), why))
    if not measured:
        table = [(kind, *cells[::2], why) for kind, *cells, why in table]
    return "\n".join(aligned(table, numbers=tuple(range(1, len(table[0]) - 1))))


def _sums(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))


def options_table(
    found: Sequence[Option], tokens: int, unfit: Mapping[str, int] = MappingProxyType({}),
    planned_by: str = "--swap-memory-gib …",
) -> str:  # fmt: skip
    """Return every option with the peak of each tier, tokens per second, whether it fits, and its flags.

    A step has ``tokens``. ``unfit``: name of an option that fits → another pipeline stage that it does not fit.
    ``planned_by``: the flag or call with which a run plans.
    """
    table = [("option", "device GiB", "host GiB", "disk GiB", "tokens/s", "fits", "flags")]
    for one in found:
        rows = [f"{gib:.2f}" for gib in (one.device_gib, one.host_gib, one.disk_gib)]
        speed = "" if one.prediction is None else f"{tokens / one.prediction.step_ms * 1000:,.0f}"
        if one.prediction is None:
            rows = [f"at least {one.needed_gib:g}", "", ""]  # no plan fits: this is the smallest feasible budget
        short = (planned_by, *one.flags) if one.is_planned else one.flags[:2]
        flags = " ".join(short) + (" …" if not one.is_planned and len(one.flags) > len(short) else "")
        fits = f"not stage {unfit[one.name]}" if one.name in unfit else "yes" if one.fits else "no"
        table.append((one.name, rows[0], rows[1], rows[2], speed, fits, flags))
    return "\n".join(aligned(table, numbers=(1, 2, 3, 4)))


def prediction_text(option: Option, unswapped: Option, tokens: int) -> str:
    """Return speed, peak of each tier, stalls and recomputation of an option that fits, and the profile's source."""
    prediction, before = option.prediction, unswapped.prediction
    assert prediction is not None, "the option has no prediction"
    assert before is not None, "the unswapped step has no prediction"
    profile = option.predicted_profile
    slower = f"{100 * (prediction.step_ms / before.step_ms - 1):+.1f} % to nothing swapped"
    if option.solution is not None:
        slower += f"; no plan is below {option.solution.lower_bound_ms:,.1f} ms in this model"
    rows = [
        ("tokens/s", f"{tokens / prediction.step_ms * 1000:,.0f}", ""),
        ("step", f"{prediction.step_ms:,.1f} ms", slower),
        ("device", gib_text(option.device_gib),
         f"{prediction.peak_at} (nothing swapped: {gib_text(unswapped.device_gib)})"),
        ("host", gib_text(option.host_gib), "pinned"),
        ("disk", gib_text(option.disk_gib), ""),
        ("waits", f"{prediction.out_stall_ms + prediction.in_stall_ms:,.1f} ms",
         f"for copies out {prediction.out_stall_ms:,.1f}, for copies in {prediction.in_stall_ms:,.1f}"),
        ("recomputed", f"{prediction.recompute_ms:,.1f} ms", "of the step"),
        ("optimizer", f"{profile.non_layer.optimizer_ms:,.1f} ms",
         f"of the step; copies of offloaded state take {copies_ms(profile):,.1f}"),
        ("profile", "", profile.source),
    ]  # fmt: skip
    unused = {"disk"} if not option.disk_gib else set()
    if profile.offloaded_state is None or not profile.offloaded_state.fraction:
        unused.add("optimizer")
    return "\n".join(aligned([row for row in rows if row[0] not in unused], numbers=1))

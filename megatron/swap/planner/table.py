"""A plan as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.swap.plan import Plan
from megatron.swap.planner.profile import OutsideSite, Profile
from megatron.swap.planner.simulate import Prediction
from megatron.swap.planner.states import BUCKETS_GIB, States
from megatron.swap.types import GIB, format_bytes


def plan_heading(plan: Plan) -> str:
    """What a plan is for, and what was predicted of it."""
    model, said = plan.model, plan.predicted
    rows = [
        ("model", f"{model.num_layers} layers of {model.hidden_size}, {model.transformer_impl}, {model.dtype}"),
        ("micro-batch", f"{model.micro_batch_size} x {model.seq_length}"),
        ("budget", "none" if plan.budget_gib is None else _gib(plan.budget_gib)),
    ]  # fmt: skip
    if said is None:
        rows.append(("predicted", "nothing: it was not made by the planner"))
    else:
        bound = "" if said.lower_bound_ms is None else f", no plan is below {said.lower_bound_ms:,.1f} ms in this model"
        rows += [("peak", _gib(said.peak_gib)), ("step", f"{said.step_ms:,.1f} ms{bound}"),
                 ("host", f"{_gib(said.host_gib)} pinned")]  # fmt: skip
    return "\n".join(_aligned(rows, numbers=None))


def plan_table(plan: Plan) -> str:
    """Site, MiB, action and why, for each class of layers; sections below their sites."""
    rows = [("layers", "site", "MiB", "action", "why")]
    for entry in plan.classes:
        label = entry.layers
        for site, planned in entry.sites.items():
            size = "" if planned.mib is None else _size(planned.mib)
            rows.append((label, site, size, planned.action, planned.why or ""))
            label = ""
        for section in entry.sections:
            rows.append((label, f"(section {section})", "", "recompute", "runs again as a whole"))
            label = ""
        if label:
            rows.append((label, "(no sites)", "", "keep", ""))
    if plan.prefetch_gib is not None:
        size = _size(plan.prefetch_gib * 1024)
        rows.append(("all", "(prefetch window)", size, "", "most that comes back ahead of its layer's backward"))
    return "\n".join(_aligned(rows, numbers=2))


def outside_table(profile: Profile) -> str:
    """Site, MiB, action and why, of what is saved outside the layers; nothing where no site is known."""
    rows = [("outside the layers", "MiB", "action", "why")]
    rows += [(site.site, _size(site.mib), "keep", _why_kept(site, profile)) for site in profile.outside.sites]
    return "\n".join(_aligned(rows, numbers=1)) if profile.outside.sites else ""


def _why_kept(site: OutsideSite, profile: Profile) -> str:
    link_ms = site.mib * (profile.out_ms_per_mib + profile.in_ms_per_mib)
    if site.stays:
        return "too small to move" if site.stays == "small" else "others hold it until forward ends"
    if site.idle_ms < link_ms:
        return f"wanted again after {site.idle_ms:.2f} ms: there and back takes {link_ms:.2f} ms on the link"
    return f"idle for {site.idle_ms:.2f} ms, but only what layers save is moved"


def memory_table(states: States, num_params: float, profile: Profile, prediction: Prediction) -> str:
    """Where every byte is when the device holds most, and what rests in host memory meanwhile."""
    states_gib = states.device_gib(num_params)
    activations_gib = prediction.peak_gib - profile.static_gib - profile.fragments_gib
    on_host_gib = states.host_gib(num_params)
    rows = [
        ("weights", states.weights_gib(num_params), 0.0, f"{num_params / 1e9:.2f} billion on this rank"),
        ("gradients", states.gradients_gib(num_params), 0.0, ""),
        ("optimizer", states.state_gib(num_params) - on_host_gib, on_host_gib, _resting(states)),
        ("libraries", profile.static_gib - states_gib, 0.0, "workspaces"),
        ("activations", activations_gib, prediction.host_gib, f"with temporaries, {prediction.peak_at}"),
        ("fragments", profile.fragments_gib, 0.0, "" if profile.fragments_gib else "not known without a measurement"),
        ("together", prediction.peak_gib, on_host_gib + prediction.host_gib, ""),
    ]
    table = [("memory", "device GiB", "host GiB", "")]
    table += [(name, f"{device:.2f}", f"{host:.2f}", why) for name, device, host, why in rows]
    return "\n".join(_aligned(table, numbers=(1, 2)))


def _resting(states: States) -> str:
    if not states.resting:
        return ""
    return f"{states.resting:.0%} of it rests; its step takes {BUCKETS_GIB:g} GiB of buckets, once activations are gone"


def prediction_text(profile: Profile, prediction: Prediction, unswapped: Prediction, lower_bound_ms: float) -> str:
    """Peak, step time and what they are made of."""
    bound = f"no plan is below {lower_bound_ms:,.1f} ms in this model"
    slower = 100 * (prediction.step_ms / unswapped.step_ms - 1)
    return "\n".join(_aligned([
        ("peak", _gib(prediction.peak_gib), f"{prediction.peak_at} (nothing swapped: {_gib(unswapped.peak_gib)})"),
        ("step", f"{prediction.step_ms:,.1f} ms", f"{slower:+.1f} % to nothing swapped; {bound}"),
        ("waits", f"{prediction.out_stall_ms + prediction.in_stall_ms:,.1f} ms",
         f"for copies out {prediction.out_stall_ms:,.1f}, for copies in {prediction.in_stall_ms:,.1f}"),
        ("recomputed", f"{prediction.recompute_ms:,.1f} ms", "of the step"),
        ("host", _gib(prediction.host_gib), "pinned"),
        ("profile", "", profile.source),
    ], numbers=1))  # fmt: skip


def _gib(gib: float) -> str:
    return format_bytes(gib * GIB)


def _size(mib: float) -> str:
    return f"{mib:,.0f}" if mib >= 10 else f"{mib:.2f}"


def _aligned(rows: Sequence[tuple[str, ...]], numbers: int | tuple[int, ...] | None) -> Iterator[str]:
    """Lines of columns; those at ``numbers``, if any, are set to the right."""
    right = (numbers,) if isinstance(numbers, int) else numbers or ()
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()

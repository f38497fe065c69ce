"""A plan as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.swap.plan import Plan
from megatron.swap.planner.profile import Profile
from megatron.swap.planner.simulate import Prediction


def plan_table(plan: Plan) -> str:
    """Site, MiB, action and why, for each class of layers."""
    rows = [("layers", "site", "MiB", "action", "why")]
    for entry in plan.classes:
        label = entry.layers
        for site, planned in entry.sites.items():
            size = "" if planned.mib is None else f"{planned.mib:,.0f}" if planned.mib >= 10 else f"{planned.mib:.2f}"
            rows.append((label, site, size, planned.action, planned.why or ""))
            label = ""
    return "\n".join(_aligned(rows, numbers=2))


def prediction_text(profile: Profile, prediction: Prediction, unswapped: Prediction, lower_bound_ms: float) -> str:
    """Peak, step time and what they are made of."""
    bound = f"no plan is below {lower_bound_ms:,.1f} ms in this model"
    slower = 100 * (prediction.step_ms / unswapped.step_ms - 1)
    return "\n".join(_aligned([
        ("peak", f"{prediction.peak_gib:.2f} GiB", f"{prediction.peak_at} (nothing swapped: {unswapped.peak_gib:.2f})"),
        ("step", f"{prediction.step_ms:,.1f} ms", f"{slower:+.1f} % to nothing swapped; {bound}"),
        ("waits", f"{prediction.out_stall_ms + prediction.in_stall_ms:,.1f} ms",
         f"for copies out {prediction.out_stall_ms:,.1f}, for copies in {prediction.in_stall_ms:,.1f}"),
        ("recomputed", f"{prediction.recompute_ms:,.1f} ms", "of the step"),
        ("host", f"{prediction.host_gib:.2f} GiB", "pinned"),
        ("profile", "", profile.source),
    ], numbers=1))  # fmt: skip


def _aligned(rows: Sequence[tuple[str, ...]], numbers: int) -> Iterator[str]:
    """Lines of columns; the one at ``numbers`` is set to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i == numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()

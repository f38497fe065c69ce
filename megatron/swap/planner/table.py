"""Formats plans as tables for people."""

from collections.abc import Iterator, Sequence

from megatron.swap.common.plan import Plan
from megatron.swap.common.printable import printable
from megatron.swap.common.types import GIB, format_bytes
from megatron.swap.planner.profile import NonLayerSite, Profile


def plan_heading(plan: Plan) -> str:
    """Return the model, micro-batch and budget of a plan, and its predictions."""
    model, predicted = plan.model, plan.predicted
    rows = [
        ("model", f"{model.num_layers} layers of {model.hidden_size}, {model.transformer_impl}, {model.dtype}"),
        ("micro-batch", f"{model.micro_batch_size} x {model.seq_length}"),
        ("budget", "none" if plan.budget_gib is None else gib_text(plan.budget_gib)),
    ]  # fmt: skip
    if predicted is None:
        rows.append(("predicted", "nothing: the planner did not make this plan"))
    else:
        bound_ms = predicted.lower_bound_ms
        bound = "" if bound_ms is None else f", no plan is below {bound_ms:,.1f} ms in this model"
        rows += [("peak", gib_text(predicted.peak_gib)), ("step", f"{predicted.step_ms:,.1f} ms{bound}"),
                 ("host", f"{gib_text(predicted.host_gib)} pinned")]  # fmt: skip
    return "\n".join(aligned(rows, numbers=None))


def plan_table(plan: Plan) -> str:
    """Return site, size, action and reason for each class of layers, with its sections after its sites."""
    rows = [("layers", "site", "MiB", "action", "why")]
    for entry in plan.classes:
        label = entry.layers
        for site, planned in entry.sites.items():
            size = "" if planned.mib is None else _size(planned.mib)
            rows.append((label, site, size, planned.action, planned.why or ""))
            label = ""
        for section in entry.sections:
            rows.append((label, f"(section {section})", "", "recompute", "recomputed as a whole"))
            label = ""
        if label:
            rows.append((label, "(no sites)", "", "keep", ""))
    if plan.prefetch_gib is not None:
        size = _size(plan.prefetch_gib * 1024)
        rows.append(("all", "(prefetch window)", size, "", "maximum prefetched ahead of its layer's backward"))
    return "\n".join(aligned(rows, numbers=2))


def non_layer_table(profile: Profile) -> str:
    """Return site, size, action and reason for storages saved outside the layers; empty if no site is known."""
    rows = [("outside the layers", "MiB", "action", "why")]
    rows += [(site.site, _size(site.mib), "keep", _why_kept(site, profile)) for site in profile.non_layer.sites]
    return "\n".join(aligned(rows, numbers=1)) if profile.non_layer.sites else ""


def _why_kept(site: NonLayerSite, profile: Profile) -> str:
    link_ms = site.mib * (profile.out_ms_per_mib + profile.in_ms_per_mib)
    if site.ineligible:
        return "too small to swap" if site.ineligible == "small" else "has other references until forward ends"
    if site.idle_ms < link_ms:
        return f"needed after {site.idle_ms:.2f} ms: the round trip takes {link_ms:.2f} ms on the link"
    return f"idle for {site.idle_ms:.2f} ms, but only layers' tensors are swapped"


def gib_text(gib: float) -> str:
    return format_bytes(gib * GIB)


def _size(mib: float) -> str:
    return f"{mib:,.0f}" if mib >= 10 else f"{mib:.2f}"


def aligned(rows: Sequence[tuple[str, ...]], numbers: int | tuple[int, ...] | None) -> Iterator[str]:
    """Yield lines with aligned columns. Columns at the indices ``numbers`` are right-aligned."""
    right = (numbers,) if isinstance(numbers, int) else numbers or ()
    rows = [tuple(map(printable, row)) for row in rows]  # names come from files
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()

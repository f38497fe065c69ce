"""The cost of swapping: measured against the same run without swapping, and predicted by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.flags import (
    Shape,
    is_ours,
    is_planned,
    recomputed_sites,
    shape,
    swapped_layers,
    swapped_modules,
    swaps_optimizer,
    without_swap,
)
from benchmarks.rows import GIB, Row, peak_gib

FREE_RATIO = 1.02
"""Swapping counts as free up to this multiple of the unswapped step."""


@dataclass(frozen=True)
class Rung:
    """One swapped run and its unswapped run. Sizes and times are per micro-batch; unknown ones are ``None``."""

    row: Row
    unswapped: Row
    shape: Shape
    ratio: float
    """Swapped step time ÷ unswapped step time."""
    fell_gib: float | None
    """How much lower the peak is than that of the unswapped run."""
    out_gib: float
    out_ms: float | None
    """Time of the copies out at the link's full speed."""
    in_ms: float | None
    forward_ms: float | None
    """Forward time of the unswapped run after its first layer: before that there is nothing to copy."""
    backward_ms: float | None
    measured_hidden: float | None
    """Fraction of the copies' time that did not make the step longer."""

    @property
    def load(self) -> float | None:
        """Return time of the copies out ÷ forward time that can hide them."""
        return self.out_ms / self.forward_ms if self.out_ms is not None and self.forward_ms else None

    @property
    def predicted_out(self) -> float | None:
        """Return the hidden fraction of the copies out: forward time x link speed / bytes, at most 1."""
        return None if self.load is None else min(1.0, 1.0 / self.load)

    @property
    def predicted_hidden(self) -> float | None:
        """Return the hidden fraction of the copies in both directions; backward hides the copies in."""
        if self.out_ms is None or self.in_ms is None or self.forward_ms is None or self.backward_ms is None:
            return None
        hidden_ms = min(self.out_ms, self.forward_ms) + min(self.in_ms, self.backward_ms)
        return hidden_ms / (self.out_ms + self.in_ms)

    def predicted_ratio(self, load: float) -> float | None:
        """Predict swapped ÷ unswapped step time if the copies out took ``load`` x the forward time that hides them."""
        if self.load is None or self.out_ms is None or self.in_ms is None:
            return None
        if self.forward_ms is None or self.backward_ms is None:
            return None
        out_ms = load * self.forward_ms
        in_ms = out_ms * self.in_ms / self.out_ms
        exposed_ms = max(0.0, out_ms - self.forward_ms) + max(0.0, in_ms - self.backward_ms)
        return 1.0 + self.shape.num_micro_batches * exposed_ms / float(self.unswapped["step_ms_median"])

    def is_unexplained(self, least_ratio: float) -> bool:
        """Return whether the step is at least ``least_ratio`` x the unswapped one though the link should hide all."""
        return self.is_link_bound is False and self.ratio >= least_ratio

    @property
    def is_link_bound(self) -> bool | None:
        """Return whether the copies of one direction take longer than the compute that could hide them."""
        predicted = self.predicted_hidden
        return None if predicted is None else predicted < 1.0


@dataclass(frozen=True)
class CaseCost:
    """How much of one shape's copies forward can hide, and what swapping costs there."""

    suite: str
    case: str
    shape: Shape
    everything: Rung | None
    """The run that swaps all layers, without recomputation."""
    free: Rung | None
    """The run that swaps most at a step ratio of at most ``FREE_RATIO``."""


def unswapped_run_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the run of the same case with the same flags but no swapping, and no wrapper around the model."""
    words = without_swap(row)
    plain = (other for other in rows if other["outcome"] == "ok" and not is_ours(other) and not other.get("wrap"))
    return next((other for other in plain if other["case"] == row["case"] and without_swap(other) == words), None)


def rung(row: Row, rows: Sequence[Row]) -> Rung | None:
    """Compare a swapped run with its unswapped run.

    Returns ``None`` where the arithmetic of copies does not apply: one of the two runs is missing or failed, the
    swapped bytes were not counted, the run followed a plan (which keeps, swaps and recomputes tensor by tensor), or it
    offloaded optimizer state too.
    """
    unswapped = unswapped_run_of(row, rows)
    if unswapped is None or row["outcome"] != "ok" or not row.get("swapped_out_bytes"):
        return None
    if is_planned(row) or swaps_optimizer(row):
        return None
    dimensions = shape(row)
    number = dimensions.num_micro_batches
    link = row.get("link")
    out_bytes, in_bytes = row["swapped_out_bytes"] / number, row["swapped_in_bytes"] / number
    out_ms = out_bytes / link["d2h_gb_s"] / 1e6 if link else None
    in_ms = in_bytes / link["h2d_gb_s"] / 1e6 if link else None
    forward_ms, first_ms = unswapped.get("forward_ms"), unswapped.get("first_layer_forward_ms")
    peaks = peak_gib(unswapped), peak_gib(row)
    measured = None
    if out_ms is not None and in_ms is not None:
        exposed_ms = (row["step_ms_median"] - unswapped["step_ms_median"]) / number
        measured = min(1.0, max(0.0, 1.0 - exposed_ms / (out_ms + in_ms)))
    return Rung(
        row=row,
        unswapped=unswapped,
        shape=dimensions,
        ratio=row["step_ms_median"] / unswapped["step_ms_median"],
        fell_gib=None if peaks[0] is None or peaks[1] is None else peaks[0] - peaks[1],
        out_gib=out_bytes / GIB,
        out_ms=out_ms,
        in_ms=in_ms,
        forward_ms=None if forward_ms is None or first_ms is None else forward_ms - first_ms,
        backward_ms=unswapped.get("backward_ms"),
        measured_hidden=measured,
    )


def ladder(rows: Sequence[Row]) -> list[Rung]:
    """Return the swapped runs of one case with their unswapped runs, from the fewest bytes to the most."""
    found = [step for row in rows if is_ours(row) and (step := rung(row, rows)) is not None]
    return sorted(found, key=lambda step: (step.unswapped["method"] != "none", step.out_gib))


def is_plain(step: Rung) -> bool:
    """Return whether the runs differ by swapping alone and neither recomputes: then the cost is that of the copies."""
    return step.unswapped["method"] == "none" and recomputed_sites(step.row) is None


def case_cost(rows: Sequence[Row]) -> CaseCost | None:
    """Return the cost of one case; ``None`` where it has no swapped run to compare with ``none``."""
    steps = [step for step in ladder(rows) if is_plain(step)]
    if not steps:
        return None
    whole = [step for step in steps if swapped_modules(step.row) is None]
    everything = next((step for step in whole if swapped_layers(step.row) == "all"), None)
    free = [step for step in steps if step.ratio <= FREE_RATIO]
    first = steps[0]
    return CaseCost(first.row["suite"], first.row["case"], first.shape, everything, free[-1] if free else None)

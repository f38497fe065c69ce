"""What swapping costs beside the same run without it, and what arithmetic says that it should cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report.flags import (
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
"""Up to so many times the unswapped step, swapping counts as free."""


@dataclass(frozen=True)
class Rung:
    """One swapped run beside its base. Sizes and times are those of one micro-batch; unknown ones are ``None``."""

    row: Row
    base: Row
    shape: Shape
    ratio: float
    """Its step over the base's."""
    fell_gib: float | None
    """By how much the peak is lower than the base's."""
    out_gib: float
    out_ms: float | None
    """Copies out at the link's full speed."""
    in_ms: float | None
    forward_ms: float | None
    """The base's forward after its first layer: before that nothing is there to copy."""
    backward_ms: float | None
    measured_hidden: float | None
    """Share of the copies' time by which the step did not get longer than the base's."""

    @property
    def load(self) -> float | None:
        """Time of the copies out over the forward that can hide them."""
        return self.out_ms / self.forward_ms if self.out_ms is not None and self.forward_ms else None

    @property
    def predicted_out(self) -> float | None:
        """Hidden share of the copies out: forward time x link speed / bytes, at most all of it."""
        return None if self.load is None else min(1.0, 1.0 / self.load)

    @property
    def predicted_hidden(self) -> float | None:
        """The same of copies in both directions together, those back in under backward."""
        if self.out_ms is None or self.in_ms is None or self.forward_ms is None or self.backward_ms is None:
            return None
        hidden_ms = min(self.out_ms, self.forward_ms) + min(self.in_ms, self.backward_ms)
        return hidden_ms / (self.out_ms + self.in_ms)

    def predicted_ratio(self, load: float) -> float | None:
        """Its step over the base's, by arithmetic, if the copies took ``load`` times the forward that can hide them."""
        if self.load is None or self.out_ms is None or self.in_ms is None:
            return None
        if self.forward_ms is None or self.backward_ms is None:
            return None
        out_ms = load * self.forward_ms
        in_ms = out_ms * self.in_ms / self.out_ms
        exposed_ms = max(0.0, out_ms - self.forward_ms) + max(0.0, in_ms - self.backward_ms)
        return 1.0 + self.shape.num_micro_batches * exposed_ms / float(self.base["step_ms_median"])

    def is_unexplained(self, least_ratio: float) -> bool:
        """The link hides all copies by arithmetic, and the step is longer by ``least_ratio`` or more nevertheless."""
        return self.is_link_bound is False and self.ratio >= least_ratio

    @property
    def is_link_bound(self) -> bool | None:
        """The copies of one direction take longer than what could hide them."""
        predicted = self.predicted_hidden
        return None if predicted is None else predicted < 1.0


@dataclass(frozen=True)
class CaseCost:
    """One shape: how much of it forward can hide, and what swapping costs there."""

    suite: str
    case: str
    shape: Shape
    everything: Rung | None
    """All layers swapped, without recomputation."""
    free: Rung | None
    """The most swapped at no more than ``FREE_RATIO``."""


def base_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The run of the same case with the same flags and no swapping, nothing else wrapped around the model."""
    words = without_swap(row)
    plain = (other for other in rows if other["outcome"] == "ok" and not is_ours(other) and not other.get("wrap"))
    return next((other for other in plain if other["case"] == row["case"] and without_swap(other) == words), None)


def rung(row: Row, rows: Sequence[Row]) -> Rung | None:
    """``None``: the run or its base failed or is missing, nobody counted what was swapped, or it went by a plan, or
    swapped optimizer state too.

    A plan mixes all means, tensor by tensor: the arithmetic of copies alone says nothing of it, nor of what an
    optimizer's step takes.
    """
    base = base_of(row, rows)
    if base is None or row["outcome"] != "ok" or not row.get("swapped_out_bytes"):
        return None
    if is_planned(row) or swaps_optimizer(row):
        return None
    dimensions = shape(row)
    number = dimensions.num_micro_batches
    link = row.get("link")
    out_bytes, in_bytes = row["swapped_out_bytes"] / number, row["swapped_in_bytes"] / number
    out_ms = out_bytes / link["d2h_gb_s"] / 1e6 if link else None
    in_ms = in_bytes / link["h2d_gb_s"] / 1e6 if link else None
    forward_ms, first_ms = base.get("forward_ms"), base.get("first_layer_forward_ms")
    peaks = peak_gib(base), peak_gib(row)
    measured = None
    if out_ms is not None and in_ms is not None:
        exposed_ms = (row["step_ms_median"] - base["step_ms_median"]) / number
        measured = min(1.0, max(0.0, 1.0 - exposed_ms / (out_ms + in_ms)))
    return Rung(
        row=row,
        base=base,
        shape=dimensions,
        ratio=row["step_ms_median"] / base["step_ms_median"],
        fell_gib=None if peaks[0] is None or peaks[1] is None else peaks[0] - peaks[1],
        out_gib=out_bytes / GIB,
        out_ms=out_ms,
        in_ms=in_ms,
        forward_ms=None if forward_ms is None or first_ms is None else forward_ms - first_ms,
        backward_ms=base.get("backward_ms"),
        measured_hidden=measured,
    )


def ladder(rows: Sequence[Row]) -> list[Rung]:
    """The swapped runs of one case beside their bases, from the fewest bytes to the most."""
    found = [step for row in rows if is_ours(row) and (step := rung(row, rows)) is not None]
    return sorted(found, key=lambda step: (step.base["method"] != "none", step.out_gib))


def is_plain(step: Rung) -> bool:
    """It swaps and does nothing else, beside a run that does neither: what it costs is what its copies cost."""
    return step.base["method"] == "none" and recomputed_sites(step.row) is None


def case_cost(rows: Sequence[Row]) -> CaseCost | None:
    """``None`` where the case has no swapped run beside ``none``."""
    steps = [step for step in ladder(rows) if is_plain(step)]
    if not steps:
        return None
    whole = [step for step in steps if swapped_modules(step.row) is None]
    everything = next((step for step in whole if swapped_layers(step.row) == "all"), None)
    free = [step for step in steps if step.ratio <= FREE_RATIO]
    first = steps[0]
    return CaseCost(first.row["suite"], first.row["case"], first.shape, everything, free[-1] if free else None)

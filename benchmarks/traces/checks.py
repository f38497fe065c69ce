"""Check the order of every copy, and compare the copies with the engine's own counts.

Order is derived from the launches on the host, not from device times alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.traces.device import Compute
from benchmarks.traces.engine import Engine, Step
from benchmarks.traces.records import US
from benchmarks.traces.storages import TracedStorage

TOLERANCE_NS = US  # Resolution of the device's clock across its engines

RULES = {
    "out_after_compute": "a copy out starts after the compute launched before its swap_out range",
    "in_before_use": "a copy in ends before the compute launched after its wait",
    "out_before_reuse": "a copy out ends before the compute launched after its memory was released",
    "in_after_out": "a copy in starts after the same storage's copy out has ended",
    "in_after_compute": "a copy in starts after the compute launched before its prefetch or swap_in range",
}


UNJUDGED = {
    "never_given_back": "the memory was never released",
    "nothing_computed_after": "nothing was computed after the release",
}
"""Reasons why a copy out cannot be checked against the reuse of its memory."""


@dataclass(frozen=True)
class Violation:
    rule: str
    step: int
    group: str
    site: str
    by_us: float

    def __str__(self) -> str:
        where = f"step {self.step}, {self.site} {self.group.split()[-1]}"
        return f"{self.rule}: {where}: {self.by_us:.1f} µs too early ({RULES[self.rule]})"


@dataclass
class Ordering:
    num_checked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    least_margin_us: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(RULES))
    violations: list[Violation] = field(default_factory=list)
    reuse_not_judged: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UNJUDGED, 0))
    """Number of copies out that ``out_before_reuse`` cannot check, by the reason in ``UNJUDGED``."""

    def check(self, rule: str, storage: TracedStorage, first_ns: int | None, then_ns: int | None) -> None:
        """Check that ``first_ns`` is not later than ``then_ns``; if either is ``None``, nothing is checked."""
        if first_ns is None or then_ns is None:
            return
        margin_us = (then_ns - first_ns) / US
        least = self.least_margin_us[rule]
        self.num_checked[rule] += 1
        self.least_margin_us[rule] = margin_us if least is None else min(least, margin_us)
        if then_ns - first_ns < -TOLERANCE_NS:
            out = storage.out
            self.violations.append(Violation(rule, storage.step.number, out.group, out.site, -margin_us))


def check_order(storages: Sequence[TracedStorage], compute: Compute) -> Ordering:
    ordering = Ordering()
    for storage in storages:
        out = storage.out
        if out.why:
            ordering.check("out_after_compute", storage, compute.end_before(out.ordered_ns), out.start_ns)
        released = storage.release or storage.overtaken
        reused_ns = None if released is None else compute.start_after(released.at.end_ns)
        ordering.check("out_before_reuse", storage, out.end_ns, reused_ns)
        if released is None:
            ordering.reuse_not_judged["never_given_back"] += 1
        elif reused_ns is None:
            ordering.reuse_not_judged["nothing_computed_after"] += 1
        for back in storage.reloads:
            copy = back.copy
            ordering.check("in_after_out", storage, out.end_ns, copy.start_ns)
            if copy.why:
                ordering.check("in_after_compute", storage, compute.end_before(copy.ordered_ns), copy.start_ns)
            if back.wait is not None:
                ordering.check("in_before_use", storage, copy.end_ns, compute.start_after(back.wait.at.end_ns))
    ordering.violations.sort(key=lambda violation: -violation.by_us)
    return ordering


@dataclass(frozen=True)
class StepCopies:
    num_out_copies: int
    swapped_out_bytes: int
    num_in_copies: int
    swapped_in_bytes: int


def count_copies(engine: Engine, step: Step) -> StepCopies:
    def count(direction: str) -> tuple[int, int]:
        pieces = [piece for copy in engine.launched_in(step, direction) for piece in copy.pieces]
        return len(pieces), sum(piece.num_bytes for piece in pieces)

    return StepCopies(*count("out"), *count("in"))


def compare_with_summary(engine: Engine, summary: dict[str, Any]) -> Iterator[str]:
    records = {record["iteration"]: record for record in summary.get("steps", [])}
    for step in engine.steps:
        record = records.get(step.number)
        if record is None:
            yield f"step {step.number} is not in the summary, which has {_span(sorted(records))}: is it of another run?"
            continue
        for name, in_trace in vars(count_copies(engine, step)).items():
            if name not in record:
                yield f"step {step.number}: the summary has no {name}: it was written by an older version"
            elif record[name] != in_trace:
                yield f"step {step.number}: {name} is {in_trace} in the trace, {record[name]} in the summary"


def _span(numbers: Sequence[int]) -> str:
    return f"steps {numbers[0]}-{numbers[-1]}" if numbers else "no steps"

"""Figures of a run on this rank."""

from dataclasses import dataclass

from megatron.swap.common.types import GIB, format_bytes


@dataclass(frozen=True)
class Stats:
    """Figures of this rank since the start."""

    out_bytes: int = 0  # copied to host memory
    in_bytes: int = 0  # copied back
    stayed_bytes: int = 0  # copied but not released: others referred to the tensor, or it was changed
    # Storages whose reload began only with their layer's backward. 0, except in steps that a planner measures, and if
    # the prefetch window is smaller than a layer's offloads.
    num_late: int = 0
    wait_ms: float = 0.0  # compute waited for copies, as far as the device has run
    held_bytes: int = 0  # of activations, offloaded now
    host_peak_bytes: int = 0  # most bytes of activations offloaded at once
    host_bytes: int = 0  # reserved host memory, with optimizer state
    state_bytes: int = 0  # of optimizer state, offloaded now
    num_rescues: int = 0  # failed allocations that succeeded after an eviction
    rescued_bytes: int = 0  # evicted for them
    num_steps: int = 0  # training steps that have ended; 0 if nobody counts them
    stage: str | None = None  # `profile`, `search` or `stable` while a planner decides
    budget_gib: float | None = None  # most device memory that a step may take; None without a budget
    predicted_gib: float | None = None  # peak of a step under the present plan; None without a plan
    predicted_ms: float | None = None  # time of a step under the present plan
    peak_gib: float | None = None  # of the last step, measured, the worst of all ranks; None if not measured
    step_ms: float | None = None  # as `peak_gib`

    @property
    def host_booked_bytes(self) -> int:
        """An older name of ``host_bytes``."""
        return self.host_bytes

    def __str__(self) -> str:
        text = ""
        if self.num_steps:
            text = f"{self.num_steps} {'step' if self.num_steps == 1 else 'steps'}: "
        text += (
            f"{format_bytes(self.out_bytes)} out, {format_bytes(self.in_bytes)} in, {self.num_late} late, "
            f"{self.wait_ms:.1f} ms waited, at most {format_bytes(self.host_peak_bytes)} in host memory"
        )
        if self.state_bytes:
            text += f", {format_bytes(self.state_bytes)} of optimizer state offloaded"
        if self.budget_gib is not None:
            text += f"; {self.stage} within {format_bytes(self.budget_gib * GIB)}"
        if self.peak_gib is not None:
            text += f", last step {format_bytes(self.peak_gib * GIB)}"
        if self.predicted_gib is not None:
            text += f" (predicted {format_bytes(self.predicted_gib * GIB)})"
        return text

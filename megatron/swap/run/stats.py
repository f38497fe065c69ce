"""Figures of a run on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.swap.common.types import GIB, format_bytes


@dataclass(frozen=True)
class Stats:
    """Figures of this rank since the start.

    Attributes:
        out_bytes, in_bytes: copied to host memory, and back.
        stayed_bytes: copied but not released, because others referred to the tensor or it was changed.
        num_late: storages whose reload began only with their layer's backward. 0, but in steps that a planner measures,
            and where the prefetch window is smaller than what a layer offloads.
        wait_ms: time that compute waited for copies, as far as the device has run.
        held_bytes: activations that are offloaded now.
        host_peak_bytes: most bytes of activations offloaded at once.
        host_bytes: host memory that is reserved, with optimizer state.
        state_bytes: optimizer state that is offloaded now.
        num_rescues, rescued_bytes: failed allocations that succeeded after an eviction, and the bytes evicted for them.
        num_steps: training steps that have ended; 0 where nobody counts them.
        stage: ``profile``, ``search`` or ``stable`` while a planner decides; ``None``: none does.
        budget_gib: most device memory that a step may take; ``None``: there is no budget.
        predicted_gib, predicted_ms: peak and time of a step under the present plan; ``None``: there is no plan.
        peak_gib, step_ms: those of the last step, measured, the worst of all ranks; ``None``: not measured.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    stayed_bytes: int = 0
    num_late: int = 0
    wait_ms: float = 0.0
    held_bytes: int = 0
    host_peak_bytes: int = 0
    host_bytes: int = 0
    state_bytes: int = 0
    num_rescues: int = 0
    rescued_bytes: int = 0
    num_steps: int = 0
    stage: str | None = None
    budget_gib: float | None = None
    predicted_gib: float | None = None
    predicted_ms: float | None = None
    peak_gib: float | None = None
    step_ms: float | None = None

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
            f"{self.wait_ms:.1f} ms waited, {format_bytes(self.host_bytes)} of host memory"
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

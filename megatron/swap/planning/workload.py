"""Steps and workloads: the figures that decide whether a plan still matches the training steps."""

import math
from dataclasses import dataclass

from megatron.swap.common.plan import Predicted

DRIFT = 0.05  # fraction by which sizes and times may differ from those of the plan


@dataclass(frozen=True)
class Step:
    """Measurements of a training step, each the worst of all ranks."""

    number: int  # iteration, from 1 on
    ms: float | None  # duration in ms; None while unknown
    peak_gib: float  # most memory that the device held during the step
    num_tensors: float  # saved by the largest micro-batch
    saved_mib: float  # their bytes
    num_micro_batches: int
    full_gib: float = 0.0  # excess above the budget that counts where the device was full below its budget

    def over_gib(self, budget_gib: float) -> float:
        """Return by how much the step exceeded ``budget_gib``; below 0 if it stayed within it."""
        return max(self.peak_gib - budget_gib, self.full_gib or -math.inf)


@dataclass(eq=False)
class Workload:
    """Steps that save alike, so that one plan serves all of them."""

    # Range of the tensors that recorded steps saved.
    fewest_tensors: float
    most_tensors: float
    saved_mib: float  # most that a recorded step saved
    num_micro_batches: int  # micro-batches of a step
    best_ms: float | None = None  # duration of a step under the chosen plan, in ms; None while unknown
    spare_gib: float = 0.0  # the solver gets this much less than the budget, because measured peaks exceeded the budget
    num_tightened: int = 0  # how often ``spare_gib`` was raised
    too_high_gib: float = math.inf  # lowest predicted peak of a plan whose measured peak led to that
    num_widened: int = 0  # how often a plan was tried that uses memory which others left free

    def include(self, step: Step) -> None:
        """Widen the workload by a further recorded step."""
        self.fewest_tensors = min(self.fewest_tensors, step.num_tensors)
        self.most_tensors = max(self.most_tensors, step.num_tensors)
        self.saved_mib = max(self.saved_mib, step.saved_mib)

    def leave_more(self, over_gib: float, peak_gib: float, predicted: Predicted | None) -> None:
        """Have the solver leave more memory, after a plan held ``peak_gib``, ``over_gib`` above the budget."""
        if predicted is None:
            self.spare_gib += over_gib
        else:
            self.spare_gib = max(self.spare_gib + over_gib, peak_gib - predicted.peak_gib)
            self.too_high_gib = min(self.too_high_gib, predicted.peak_gib)

    def has_sites_of(self, step: Step) -> bool:
        # A pipeline with more micro-batches holds more of them at once. The number of tensors may drift, since an
        # expert without a token saves nothing.
        is_as_many = step.num_micro_batches == self.num_micro_batches
        return is_as_many and (1 - DRIFT) * self.fewest_tensors <= step.num_tensors <= (1 + DRIFT) * self.most_tensors

    def saves_as_much_as(self, step: Step) -> bool:
        """Whether ``step`` saves about as many bytes, so that figures of one say something of the other."""
        # Without fused rotary embeddings the number of tensors follows packed documents; their bytes do not.
        is_as_many = step.num_micro_batches == self.num_micro_batches
        return is_as_many and abs(step.saved_mib - self.saved_mib) <= DRIFT * self.saved_mib

    def is_like(self, step: Step) -> bool:
        return self.has_sites_of(step) and self.saves_as_much_as(step)

    def covers(self, step: Step) -> bool:
        """Whether the workload's plan keeps ``step`` within the budget as well."""
        is_smaller = self.has_sites_of(step) and step.saved_mib <= self.saved_mib
        return is_smaller or self.saves_as_much_as(step)

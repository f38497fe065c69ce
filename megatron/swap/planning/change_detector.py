"""Detects that steps no longer match their plan: they save more, save less, or are slower. Patience is learned."""

from collections.abc import Callable

from megatron.swap.planning.workload import DRIFT, Step, Workload

MAX_RECORDED_STEPS = 16
"""Most steps that are recorded while none is as large as the step for which recording began. Lengths may change in
every step. Rarer large steps get no plan of their own: under the current plan they swap what it would keep."""
PATIENCE_SMALLER = 3
"""Steps in a row that save less before the plan is changed. Doubled when a change measures a new workload, or when
larger steps come back soon."""
OTHER_TENSORS = 4
"""Multiple of that patience for steps that save as much in other tensors. The plan fits them too if only the number of
packed documents has changed, which chance decides in each step."""
SOON = 4  # multiple of the patience, in steps, within which larger steps count as back soon
PATIENCE_RARE = 1  # rare larger steps, close to each other, before they get a plan. Doubled when recording saw none.
PATIENCE_SLOWER = 20  # slow steps in a row before the workload is measured again; doubled each time


class ChangeDetector:
    """Compares steps with the workload that the running plan was made for."""

    def __init__(self) -> None:
        self._num_smaller = self._num_slower = 0
        self._patience_smaller = PATIENCE_SMALLER
        self._patience_slower = PATIENCE_SLOWER
        self._smaller_at: int | None = None
        self._rare_mib = 0.0
        self._num_rare = self._rare_at = 0
        self._patience_rare = PATIENCE_RARE

    def reset(self) -> None:
        """Count steps in a row anew, because a plan was chosen."""
        self._num_smaller = self._num_slower = 0

    def has_changed(self, step: Step, planned: Workload, is_known: Callable[[Step], bool]) -> bool:
        """Whether the plan should change: at once if more is saved, with patience otherwise."""
        if planned.is_like(step):
            self._num_smaller = 0
            return False
        if not planned.covers(step):
            return not self._is_rare(step, planned, is_known)
        # The plan for more still fits, and lengths may alternate.
        self._num_smaller += 1
        return self._num_smaller >= self._patience_smaller * (1 if planned.has_sites_of(step) else OTHER_TENSORS)

    def _is_rare(self, step: Step, planned: Workload, is_known: Callable[[Step], bool]) -> bool:
        """Whether recording once saw no step as large as this one, and such steps are still not frequent."""
        is_within = planned.has_sites_of(step) and step.saved_mib <= (1 + DRIFT) * self._rare_mib
        if not is_within or is_known(step):
            return False
        is_far = step.number - self._rare_at > MAX_RECORDED_STEPS
        self._num_rare, self._rare_at = (0 if is_far else self._num_rare) + 1, step.number
        return self._num_rare < self._patience_rare

    def is_slower(self, step: Step, planned: Workload) -> bool:
        """Whether steps have long been slower than ``planned.best_ms``, so that the workload is measured again."""
        is_slow = step.ms is not None and planned.best_ms is not None and step.ms > (1 + DRIFT) * planned.best_ms
        self._num_slower = self._num_slower + 1 if is_slow else 0
        if self._num_slower < self._patience_slower:
            return False
        self._patience_slower *= 2
        return True

    def changed(self, step: Step, before: Workload, is_known: bool) -> None:
        """Adapt the patience when the plan of ``before`` is replaced by a plan for steps like ``step``."""
        self._num_smaller = 0
        if before.covers(step):
            self._smaller_at = step.number
            if not is_known:  # no plan exists for such steps, so they are measured
                self._patience_smaller *= 2
        elif self._smaller_at is not None and step.number - self._smaller_at <= SOON * self._patience_smaller:
            self._patience_smaller *= 2
            self._smaller_at = None

    def missed_large_steps(self, saved_mib: float) -> None:
        """Note that recording saw no step that saves ``saved_mib``, for which it had begun."""
        self._rare_mib, self._num_rare = max(self._rare_mib, saved_mib), 0
        self._patience_rare *= 2

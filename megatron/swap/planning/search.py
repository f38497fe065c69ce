"""The search over candidate plans: each runs for a few training steps, the fastest within the budget wins."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from megatron.swap.common.plan import Plan
from megatron.swap.common.types import GIB, format_bytes

NOISE = 0.03  # fraction by which a step's time varies where the GPU waits for the host now and then


@dataclass(frozen=True)
class Trial:
    """A candidate plan and its measured step; ``over_gib`` as in ``Step.over_gib``."""

    plan: Plan
    ms: float
    peak_gib: float
    over_gib: float


class CandidateSearch:
    def __init__(self, plans: Sequence[Plan], too_high_gib: float = inf) -> None:
        # ``plan``: the candidate that runs now. Another may take its place; results so far stay.
        self.plan, *self._waiting = plans
        self._too_high_gib = too_high_gib  # lowest predicted peak that proved too high in earlier searches
        self._trials: list[Trial] = []

    @property
    def is_over(self) -> bool:
        return not self._waiting

    def add(self, trial: Trial) -> None:
        self._trials.append(trial)

    def go_on(self) -> None:
        self.plan = self._waiting.pop(0)

    def has_tried(self, plan: Plan) -> bool:
        def what(one: Plan) -> tuple[object, ...]:
            return one.classes, one.prefetch_gib, one.offload_fraction

        return any(what(trial.plan) == what(plan) for trial in self._trials)

    def wider_gib(self, predicted_gib: float, free_gib: float) -> float:
        """Return a predicted peak above ``predicted_gib``, with which a plan left ``free_gib`` of the budget free."""
        too_high = [
            trial.plan.predicted.peak_gib for trial in self._trials
            if trial.over_gib > 0 and trial.plan.predicted is not None
        ]  # fmt: skip
        # Halfway to the end of the budget, or to the lowest prediction that proved too high.
        above = (one for one in (*too_high, self._too_high_gib) if one > predicted_gib)
        return (predicted_gib + min([predicted_gib + free_gib, *above])) / 2

    def restart(self) -> None:
        """Forget all results, because steps take another time now, and try all candidates again."""
        self._waiting += [trial.plan for trial in self._trials]
        self._trials = []

    def fastest(self) -> Trial | None:
        """Return the fastest candidate within the budget, or None if each exceeded the budget."""
        fitting = [trial for trial in self._trials if trial.over_gib <= 0]
        least_ms = min((trial.ms for trial in fitting), default=0.0)
        alike = [trial for trial in fitting if trial.ms <= (1 + NOISE) * least_ms]
        # Where times differ by less than noise, the prediction decides.
        return min(alike, key=_predicted_first, default=None)

    def lowest(self) -> Trial:
        return min(self._trials, key=lambda trial: (trial.over_gib, trial.peak_gib))

    def describe(self, trial: Trial) -> str:
        predicted = trial.plan.predicted
        text = f"plan {self._trials.index(trial) + 1} of {len(self._trials)}, {_figures(trial.ms, trial.peak_gib)}"
        if predicted is not None:
            text += f" (predicted {_figures(predicted.step_ms, predicted.peak_gib)})"
        return text + offload_note(trial.plan)


def _predicted_first(trial: Trial) -> tuple[float, float]:
    predicted = trial.plan.predicted
    return trial.ms if predicted is None else predicted.step_ms, trial.ms


def offload_note(plan: Plan) -> str:
    """Return how much optimizer state ``plan`` offloads, as the end of a line; empty if it does not decide that."""
    fraction = plan.offload_fraction
    return "" if fraction is None else f"; {fraction:.0%} of the optimizer's state is offloaded"


def _figures(ms: float, gib: float) -> str:
    return f"{ms:,.1f} ms and {format_bytes(gib * GIB)}"

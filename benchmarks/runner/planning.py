"""The plan of a run: budget, predictions and stages, from its session and its plan file."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLAN_FLAG = "--swap-plan"
SEARCHES = ("--swap-memory-gib", "--swap-memory-fraction")
STABLE = "stable"
NUMBERS = ("budget_gib", "predicted_peak_gib", "predicted_step_ms", "profile_sha256")


def last_value(flags: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag, which is the one that Megatron's parser takes; `None`: it is not given."""
    return next((value for name, value in reversed([*itertools.pairwise(flags)]) if name == flag), None)


def plan_file(flags: tuple[str, ...]) -> str | None:
    return next((value for flag, value in itertools.pairwise(flags) if flag == PLAN_FLAG), None)


def searches(flags: tuple[str, ...]) -> bool:
    return any(flag in flags for flag in SEARCHES) or ("--swap-policy", "auto") in itertools.pairwise(flags)


def planning(flags: tuple[str, ...], found: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the plan's figures. Of several plans that a run applied, the highest predicted peak is used."""
    path = plan_file(flags)
    if path is not None:
        found = {"num_replans": 0, "stages": [], **(found or {}), **read_prediction(path)}
    elif found is not None:
        # The measured peak is that of the whole run, so it is compared with the highest prediction.
        peaks = [stage["predicted_peak_gib"] for stage in found["stages"]]
        found = {**found, "predicted_peak_gib": max((gib for gib in peaks if gib is not None), default=None)}
    if found is None and searches(flags):
        raise ValueError("the session of a run that searched for its plan does not report a plan")
    return found


def read_prediction(path: str | Path) -> dict[str, Any]:
    from megatron.swap.common.plan import load_plan

    plan = load_plan(path)
    return {
        "budget_gib": plan.budget_gib, "predicted_peak_gib": plan.predicted and plan.predicted.peak_gib,
        "predicted_step_ms": plan.predicted and plan.predicted.step_ms,
        "lower_bound_ms": plan.predicted and plan.predicted.lower_bound_ms, "profile_sha256": plan.profile_sha256,
    }  # fmt: skip


def stages_text(found: dict[str, Any]) -> str:
    return "; ".join(
        f"{stage['stage']} {stage['first_step']} to {stage['last_step'] or 'the end'}: {stage['note']}"
        for stage in found["stages"]
    )


def unstable_steps(flags: tuple[str, ...], found: dict[str, Any] | None, first: int, last: int) -> list[int]:
    """Return the timed steps, `first` to `last` (from 1), in which the run was still profiling or searching."""
    if found is None or not searches(flags):
        return []
    stable = {
        step
        for stage in found["stages"]
        if stage["stage"] == STABLE
        for step in range(stage["first_step"], (last if stage["last_step"] is None else stage["last_step"]) + 1)
    }
    return [step for step in range(first, last + 1) if step not in stable]

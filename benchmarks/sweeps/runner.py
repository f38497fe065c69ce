"""Run a sweep, method by method, each run in a separate process at the value that the search chooses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.rows import NOT_STABLE, Row
from benchmarks.runner.launch import Child
from benchmarks.runner.planning import stages_text
from benchmarks.suites.runner import missing, undisturbed
from benchmarks.sweeps.results import SweepResults
from benchmarks.sweeps.sweep import Sweep, Trial

Attempt = tuple[str, dict[str, Any], str | None]
"""Outcome, measurements, and the last output of a failed run."""


def attempt(sweep: Sweep, trial: Trial) -> Attempt:
    """Make one run of a trial; no other measured process runs meanwhile."""
    if (package := missing(trial.method)) is not None:
        return f"missing: {package}", {}, f"no module named {package}"
    with undisturbed():
        child = Child(sweep.request(trial), on_gpu=sweep.on_gpu)
    with child:
        child.say("go")
        child.say("time")
        finished = child.finish(sweep.time_limit_s, sweep.host_limit_gib)
    if finished.outcome != "ok":
        return finished.outcome, finished.result, finished.output_tail
    if finished.result["step_ms_median"] is None:  # unstable steps are left out, and no other was timed
        why = f"no timed step was stable: raise num_steps. Stages: {stages_text(finished.result['planning'])}"
        return NOT_STABLE, finished.result, why
    return "ok", finished.result, None


def measure(
    sweep: Sweep,
    results: SweepResults,
    *,
    time_limit_s: float | None,
    on_done: Callable[[Trial, Row, float], None],
    train: Callable[[Sweep, Trial], Attempt] = attempt,
) -> bool:
    """Find the largest value of each of the sweep's methods. `on_done` is called with each run and its seconds.

    Returns:
        `True`: all methods are done. `False`: another run as long as the longest would not end within `time_limit_s`.
    """
    began, longest_s = time.monotonic(), 0.0
    for name in sweep.methods:
        while (trial := results.next_trial(name)) is not None:
            start = time.monotonic()
            if time_limit_s is not None and start - began + longest_s > time_limit_s:
                return False
            outcome, result, output_tail = train(sweep, trial)
            seconds = time.monotonic() - start
            longest_s = max(longest_s, seconds)
            on_done(trial, results.add(trial, outcome, result, output_tail, seconds), seconds)
        results.finish(name)
    return True

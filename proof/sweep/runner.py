"""Runs a sweep: method by method, the next value that tells most, each run in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from proof.bench.runner import missing, undisturbed
from proof.rows import Row
from proof.run.launch import Child
from proof.sweep.book import Book
from proof.sweep.sweep import Sweep, Trial

Proof = tuple[str, dict[str, Any], str | None]
"""Outcome, what was measured, and the last words of a run that failed."""


def prove(sweep: Sweep, trial: Trial) -> Proof:
    """Train for as many steps as the sweep says, by itself on the machine."""
    if (package := missing(trial.method)) is not None:
        return f"missing: {package}", {}, f"no module named {package}"
    with undisturbed():
        child = Child(sweep.request(trial), on_gpu=sweep.on_gpu)
    with child:
        child.say("go")
        child.say("time")
        finished = child.finish(sweep.time_limit_s, sweep.host_limit_gib)
    return finished.outcome, finished.result, None if finished.outcome == "ok" else finished.output_tail


def measure(
    sweep: Sweep,
    book: Book,
    *,
    time_limit_s: float | None,
    on_done: Callable[[Trial, Row, float], None],
    prover: Callable[[Sweep, Trial], Proof] = prove,
) -> bool:
    """Find the largest value of each of the sweep's methods; ``on_done`` gets each run and the seconds that it took.

    Returns:
        Whether all was done: ``False`` when another run as long as the longest would not end within ``time_limit_s``.
    """
    began, longest_s = time.monotonic(), 0.0
    for name in sweep.methods:
        while (trial := book.next_trial(name)) is not None:
            start = time.monotonic()
            if time_limit_s is not None and start - began + longest_s > time_limit_s:
                return False
            proof = prover(sweep, trial)
            seconds = time.monotonic() - start
            longest_s = max(longest_s, seconds)
            on_done(trial, book.add(trial, *proof, seconds), seconds)
        book.finish(name)
    return True

"""Soak of a suite's case whose lengths change: ``python -m benchmarks.soak.lengths --minutes 20``.

Three runs train side by side on one device: one without swapping; *planned*, for ``--budget-gib``, with the guard on;
and *guarded*, where the guard alone makes do with ``--device-gib``, so that it rescues in steps of long sequences. Each
cycle of lengths ends with an evaluation. There are no checkpoints. Ends with status 1 if a metric grows, or if a loss
differs from the run without swapping.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.runner.launch import GPU_ENVIRONMENT
from benchmarks.soak import trainer
from benchmarks.soak.command import is_good, line, write
from benchmarks.soak.process import CPU, PLAIN, as_row, run_beside
from benchmarks.soak.trainer import Job
from benchmarks.suites.suite import Suite, load_suite
from benchmarks.suites.toml_file import SuiteError
from megatron.swap.common.leftovers import own_folder

LEAST_CYCLES = 3  # Cycles of lengths that a run needs, so that each third has one
MANY = 1_000_000  # Steps that no run makes: time ends it


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Suite]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak.lengths", description=__doc__)
    add = parser.add_argument
    add("--suite", default="h200-planner")
    add("--case", default="L6-lengths", help="a case whose lengths change")
    add("--minutes", type=float, default=20.0, help="from the start of the processes (default 20)")
    add("--steps", type=int, help="train this many steps in place of minutes")
    add("--stretch", type=int, metavar="STEPS", help="train this many steps of each length in place of the case's, so "
        "that there are more cycles to compare")  # fmt: skip
    add("--budget-gib", type=float, default=34.1, help="of the planned run (default 34.1)")
    add("--device-gib", type=float, default=36.0, help="all that the guarded run has (default 36)")
    add("--output", type=Path, help="also write the results as JSON, for docs/results")
    arguments = parser.parse_args(argv)
    try:
        suite = load_suite(arguments.suite).chosen([arguments.case], [], None)
    except SuiteError as error:
        parser.error(str(error))
    (case,) = suite.cases
    if not case.sequence_schedule:
        parser.error(f"--case {case.name} of {suite.name}: its lengths do not change")
    if suite.on_gpu and not torch.cuda.is_available():
        parser.error(f"--suite {suite.name} needs a GPU, and there is none; quick-planner and L6-h64-lengths do not")
    if arguments.stretch is not None:
        schedule = tuple((arguments.stretch, length) for _, length in case.sequence_schedule)
        case = replace(case, sequence_schedule=schedule)
        suite = replace(suite, cases=(case,))
    least = LEAST_CYCLES * Job(case.sequence_schedule).cycle
    if arguments.steps is not None and arguments.steps < least:
        parser.error(f"--steps {arguments.steps}: at least {least}, so that each third has a whole cycle of lengths")
    return arguments, suite


def main(argv: Sequence[str] | None = None) -> int:
    arguments, suite = parse(argv)
    (case,) = suite.cases
    job = Job(case.sequence_schedule, 60 * arguments.minutes if arguments.steps is None else None)
    flags = [
        *case.flags, "--train-iters", f"{arguments.steps or MANY}", "--eval-iters", "1", "--eval-interval",
        f"{job.cycle}", "--log-interval", "100",
    ]  # fmt: skip
    on_cpu = "" if suite.on_gpu else f" --swap-cpu-memory-gib {arguments.device_gib}"
    runs = {
        "plain": (PLAIN, job),
        "planned": (f"--swap-memory-gib {arguments.budget_gib} --swap-oom-guard", job),
        "guarded": (
            f"{PLAIN} --swap-oom-guard{on_cpu}", replace(job, device_gib=arguments.device_gib if suite.on_gpu else None)
        ),
    }  # fmt: skip
    environment = {**GPU_ENVIRONMENT, **case.env} if suite.on_gpu else CPU
    given = {name: [its_job.to_json(), *flags, *swap.split()] for name, (swap, its_job) in runs.items()}
    with own_folder("swap-soak-") as (folder, owner):
        found = run_beside(folder, owner, trainer.__name__, given, environment)
    unswapped, _ = found.pop("plain")
    rows = []
    for name, (result, samples) in found.items():
        swap, its_job = runs[name]
        row = as_row(name, swap, job.cycle, result, unswapped, samples)
        rows.append({**row, "device_gib": its_job.device_gib})
        print(line(rows[-1]), flush=True)
    write(arguments.output, "benchmarks.soak.lengths", sys.argv[1:] if argv is None else argv, rows)
    return 0 if all(map(is_good, rows)) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Soak of a suite's case whose lengths change: ``python -m benchmarks.soak.lengths --minutes 20``.

Three runs train side by side on one device: without swapping; *planned*, for ``--budget-gib``
with the guard on; and *guarded*, where the guard alone makes do with ``--device-gib``, so that it rescues in every step
of long sequences. Each cycle ends with an evaluation. There are no checkpoints. Ends with status 1 if a metric grows,
or if a loss differs from the run without swapping.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner.launch import GPU_ENVIRONMENT
from benchmarks.soak import trainer
from benchmarks.soak.command import CPU, Process, as_row, is_good, line, write
from benchmarks.soak.trainer import Job
from benchmarks.suites.suite import find_suite, load_suite
from megatron.swap.common.leftovers import own_folder

PLAIN = "plain"
POLL_S = 0.5
MANY = 1_000_000
"""Steps that no run makes: time ends it."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak.lengths", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--suite", default="h200-planner")
    parser.add_argument("--case", default="L6-lengths", help="a case whose lengths change")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training (default 20)")
    parser.add_argument("--steps", type=int, help="train this many steps in place of minutes")
    parser.add_argument("--budget-gib", type=float, default=34.1, help="of the planned run (default 34.1)")
    parser.add_argument("--device-gib", type=float, default=36.0, help="all that the guarded run has (default 36)")
    parser.add_argument("--output", type=Path, help="also write the results as JSON, for docs/results")
    return parser.parse_args(argv)


def end_all(processes: dict[str, Process]) -> dict[str, dict[str, Any]]:
    """Wait for all processes and return what each has found. The first that fails ends the wait. Raises: as ``end``."""
    results: dict[str, dict[str, Any]] = {}
    while len(results) < len(processes):
        time.sleep(POLL_S)
        for name in processes.keys() - results.keys():
            if processes[name].has_ended:
                results[name] = processes[name].end()
    return {name: results[name] for name in processes}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    suite = load_suite(find_suite(arguments.suite)).chosen([arguments.case], [], None)
    (case,) = suite.cases
    if not case.sequence_schedule:
        raise SystemExit(f"--case {case.name} of {suite.name}: its lengths do not change")
    job = Job(case.sequence_schedule, None if arguments.steps else 60 * arguments.minutes)
    flags = [
        *case.flags, "--train-iters", f"{arguments.steps or MANY}", "--eval-iters", "1", "--eval-interval",
        f"{job.cycle}", "--log-interval", "100",
    ]  # fmt: skip
    guarded, limited = "--swap-layers none --swap-oom-guard", job
    if suite.on_gpu:
        limited = Job(job.lengths, job.seconds, arguments.device_gib)
    else:
        guarded += f" --swap-cpu-memory-gib {arguments.device_gib}"
    runs = {
        PLAIN: ("--swap-layers none", job),
        "planned": (f"--swap-memory-gib {arguments.budget_gib} --swap-oom-guard", job),
        "guarded": (guarded, limited),
    }
    environment = {**GPU_ENVIRONMENT, **case.env} if suite.on_gpu else CPU
    processes: dict[str, Process] = {}
    with own_folder("swap-soak-") as (folder, owner):
        try:
            for name, (swap, its_job) in runs.items():
                words = [its_job.to_json(), *flags, *swap.split()]
                processes[name] = Process(folder / name, owner, trainer.__name__, words, environment)
            results = end_all(processes)
        finally:
            for process in processes.values():
                process.kill()
        plain = results.pop(PLAIN)
        rows = [
            as_row(name, runs[name][0], job.cycle, result, plain, processes[name].samples())
            for name, result in results.items()
        ]
    for row in rows:
        print(line(row), flush=True)
    write(arguments.output, "benchmarks.soak.lengths", sys.argv[1:] if argv is None else argv, rows)
    return 0 if all(map(is_good, rows)) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Find the largest GPT, the longest sequence or the largest micro-batch that each method trains on this machine.

    python tools/sweep.py --sweep quick
    python tools/sweep.py --sweep h200-depth --method none full-recompute ours-fit --output depth.jsonl
    python tools/sweep.py --sweep h200-depth --resume --time-limit-s 540 --output depth.jsonl
    python tools/sweep.py --sweep h200-depth --dry-run --gpu h200

The planner's memory model predicts what cannot fit and where to begin. Real training steps, each run in a separate
process, decide what trains. Rows are written as runs end, without --output to runs/SWEEP-sweep.jsonl; a table and a
picture beside them.
Exit status: 0 all done; 1 a run failed for another reason than memory, timed out, its loss did not fall or its plan was
never stable; 75 runs are left (continue with --resume); 130 interrupted (finished runs are kept).
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import machine
from benchmarks.rows import GIB, MIB, NOT_FALLING, NOT_STABLE, Row, RowError, outcome
from benchmarks.store import StoreError, check_beside, locked
from benchmarks.suites.output import (
    INTERRUPTED,
    add_options,
    check_options,
    interrupt,
    measure_all,
    print_failed,
    write_pages,
)
from benchmarks.suites.progress import Steps
from benchmarks.suites.toml_file import SuiteError
from benchmarks.sweeps.forecast import Tiers
from benchmarks.sweeps.picture import draw
from benchmarks.sweeps.results import Scene, SweepResults
from benchmarks.sweeps.rows import TIERS
from benchmarks.sweeps.runner import measure
from benchmarks.sweeps.sweep import Sweep, Trial, find_sweep, load_sweep, sweep_names
from benchmarks.sweeps.table import markdown, short
from megatron.swap.common.flags import CommandLine
from megatron.swap.common.types import UsageError, format_bytes
from megatron.swap.forecast.gpus import GPUS, find_gpu, gpu_of
from megatron.swap.memory.host_memory import safe_host_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; an error is printed as one line.

    Args:
        arguments: the command-line arguments; `None`: those of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", required=True, help=f"{', '.join(sweep_names())}, or a .toml file")
    parser.add_argument("--method", nargs="+", default=[], help="only these methods")
    add_options(parser, default="SWEEP-sweep.jsonl", row="run")
    parser.add_argument("--list", action="store_true", help="print values and methods with their flags, run nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the first and the pruned values, run nothing")
    parser.add_argument("--gpu", help=f"with --dry-run: as if on one of {', '.join(GPUS)}")
    options = parser.parse_args(arguments)
    check_options(parser, options, f"{Path(options.sweep).stem}-sweep.jsonl")
    if options.gpu and not options.dry_run:
        parser.error("--gpu needs --dry-run: a sweep uses this machine's GPU")
    signal.signal(signal.SIGTERM, interrupt)
    try:
        sweep = load_sweep(find_sweep(options.sweep))
        sweep.chosen(options.method)  # refuse an unknown method before the machine is described, which takes seconds
        if options.list:
            show(sweep.chosen(options.method))
            return 0
        command = shlex.join(["python", "tools/sweep.py", *arguments])
        if options.dry_run:
            print_forecast(sweep, scene(sweep, options.gpu, command), options)
            return 0
        check_beside(options.output)
        with locked(options.output):
            return run(sweep, scene(sweep, None, command), options)
    except (SuiteError, RowError, StoreError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before the first run", flush=True)
        return INTERRUPTED


def show(sweep: Sweep) -> None:
    """Print values and methods with their flags."""
    print(f"{sweep.name}: {sweep.description}\n\n{sweep.axis_name}: {', '.join(v.label for v in sweep.values)}\n")
    print(f"{' '.join(sweep.values[0].flags)}\n")
    for name, text in sweep.methods.items():
        print(f"  {name}: {text}")


def scene(sweep: Sweep, gpu_name: str | None, command: str) -> Scene:
    """Describe this machine; with `gpu_name`, as if it had that GPU.

    Raises:
        SuiteError: a GPU is needed and there is none.
    """
    assumed = None if gpu_name is None else find_gpu(gpu_name)
    facts = machine.facts()
    gpu, device_gib = gpu_of(facts["machine"]["gpu"]), facts["machine"]["device_memory_gib"]
    if assumed is not None:
        gpu, device_gib = assumed, assumed.memory_gib
    if sweep.on_gpu and device_gib is None:
        raise SuiteError(
            f"sweep {sweep.name} needs a GPU, and this machine has none; --sweep quick runs on the CPU, --dry-run "
            "--gpu NAME prints the memory model's prediction"
        )
    if not sweep.on_gpu:
        gpu, device_gib = None, None
    budget = safe_host_bytes(1)
    host_gib = min(budget.total_bytes, budget.cgroup_limit_bytes or budget.total_bytes) / GIB
    if sweep.host_limit_gib is not None:
        host_gib = sweep.host_limit_gib if assumed else min(host_gib, sweep.host_limit_gib)
    tiers = Tiers(device_gib, host_gib, sweep.disk_gib(assumed=assumed is not None))
    return Scene(facts, tiers, gpu, command)


def print_forecast(sweep: Sweep, where: Scene, options: argparse.Namespace) -> None:
    """Print the memory model's first and pruned values of each method; no run is made.

    Raises:
        StoreError, RowError: the output file cannot be continued.
    """
    tiers = where.tiers
    device = "no device" if tiers.device is None else f"{tiers.device:.1f} GiB of device"
    print(f"{sweep.name}: {device}, {tiers.host:.1f} of host, {tiers.disk:.1f} of disk memory")
    results = SweepResults(sweep, options.output if options.resume else None, where, resume=options.resume)
    for name in sweep.chosen(options.method).methods:
        count, trial = results.count(name), results.next_trial(name)
        print(f"\n{name}")
        if trial is None:
            print("  nothing to run")
        else:
            forecast = trial.forecast
            tiers_gib = {tier: gib for tier in TIERS if (gib := forecast.of(tier))}
            needs = ", ".join(f"{format_bytes(round(gib * GIB))} of {tier}" for tier, gib in tiers_gib.items())
            what = "at least" if forecast.is_bound else "predicted"
            print(f"  begins at {trial.value.label} ({short(trial.params)} parameters): {what} {needs}")
        if count < len(sweep.values):
            beyond = results.trial(name, count)
            assert beyond.forecast.excess is not None
            print(f"  pruned from {beyond.value.label} on: {beyond.forecast.excess.text}")


def run(sweep: Sweep, where: Scene, options: argparse.Namespace) -> int:
    """Search with the chosen methods of a sweep, write its table and picture, and return the exit status.

    Raises:
        StoreError, RowError: the output file cannot be continued.
    """
    results = SweepResults(sweep, options.output, where, resume=options.resume)
    chosen = sweep.chosen(options.method)
    num_done = 0
    print(f"{sweep.name}: about {results.num_left(chosen.methods)} runs, into {options.output}", flush=True)

    def measure_sweep() -> bool:
        with Steps(results.num_left(chosen.methods), "starting") as steps:

            def done(trial: Trial, row: Row, seconds: float) -> None:
                nonlocal num_done
                num_done += 1
                left = results.num_left(chosen.methods)
                steps.step(num_done, num_done + left, line(trial, row, seconds), trial.method.name)

            return measure(chosen, results, time_limit_s=options.time_limit_s, on_done=done)

    status = measure_all(measure_sweep)
    rows = results.rows()
    if rows:
        write_pages(options.output, markdown(rows), partial(draw, rows))
    has_failed = print_failed(rows, ("timeout", NOT_FALLING, NOT_STABLE))
    return status or int(has_failed)


def line(trial: Trial, row: Row, seconds: float) -> str:
    """Describe one run that took `seconds`, in a line."""
    if row["outcome"] != "ok":
        return f"{trial.label}: {outcome(row)} ({seconds:.0f} s)"
    if row["tiers_gib"]["device"] is None:  # times of a CPU say nothing
        device = row["device_peak_gib"]
        held = "" if device is None else f", {device * GIB / MIB:.1f} MiB of emulated device memory"
        return f"{trial.label}: trains{held} ({seconds:.0f} s)"
    peaks = [("device", row["device_peak_gib"]), ("host", row["host_peak_gib"]), ("disk", row["disk_peak_gib"])]
    used = ", ".join(f"{tier} {gib:.2f} GiB" for tier, gib in peaks if gib is not None)
    return f"{trial.label}: trains, {row['tokens_per_s']:,.0f} tokens/s, {used} ({seconds:.0f} s)"


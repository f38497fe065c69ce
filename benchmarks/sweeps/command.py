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

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.rows import GIB, NOT_FALLING, NOT_STABLE, TIERS
from benchmarks.runner.grid import run_grid
from benchmarks.runner.program import add_options, check_options, guarded, new_parser
from benchmarks.store import check_beside, locked
from benchmarks.suites.toml_file import SuiteError
from benchmarks.sweeps.forecast import Tiers
from benchmarks.sweeps.picture import draw
from benchmarks.sweeps.results import Scene, SweepResults
from benchmarks.sweeps.sweep import Sweep, load_sweep, sweep_names
from benchmarks.sweeps.table import markdown, short
from megatron.swap.common.types import format_bytes
from megatron.swap.forecast.gpus import GPUS, find_gpu, gpu_of
from megatron.swap.memory.host_memory import safe_host_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = new_parser(__doc__)
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
    command = shlex.join(["python", "tools/sweep.py", *arguments])
    return guarded(lambda: run(options, command))


def run(options: argparse.Namespace, command: str) -> int:
    sweep = load_sweep(options.sweep)
    methods = sweep.chosen(options.method).methods
    if options.list:
        show(sweep, methods)
        return 0
    if options.dry_run:
        path = options.output if options.resume else None
        results = SweepResults(sweep, methods, path, scene(sweep, options.gpu, command), resume=options.resume)
        print_forecast(sweep, methods, results)
        return 0
    check_beside(options.output)
    with locked(options.output):
        results = SweepResults(sweep, methods, options.output, scene(sweep, None, command), resume=options.resume)
        print(f"{sweep.name}: about {results.num_left()} runs, into {options.output}", flush=True)
        bad = ("timeout", NOT_FALLING, NOT_STABLE)
        return run_grid(results, options.output, options.time_limit_s, markdown, draw, bad)


def show(sweep: Sweep, methods: dict[str, str]) -> None:
    print(f"{sweep.name}: {sweep.description}\n\n{sweep.axis_name}: {', '.join(v.label for v in sweep.values)}\n")
    print(f"{' '.join(sweep.values[0].flags)}\n")
    for name, text in methods.items():
        print(f"  {name}: {text}")


def scene(sweep: Sweep, gpu_name: str | None, command: str) -> Scene:
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


def print_forecast(sweep: Sweep, methods: dict[str, str], results: SweepResults) -> None:
    tiers = results.scene.tiers
    device = "no device" if tiers.device is None else f"{tiers.device:.1f} GiB of device"
    print(f"{sweep.name}: {device}, {tiers.host:.1f} of host, {tiers.disk:.1f} of disk memory")
    for name in methods:
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

"""Soak: thousands of steps on a CPU, with swapping and without, and what the process holds on the way.

The cases ``planned`` and ``guarded`` train through Megatron's trainer: plans and lengths change, evaluations and
checkpoints come between, the guard rescues, optimizer state or activations lie on disk. The other cases are loops
around ``swap.activations``. Ends with status 1 if a metric grows, or if a loss differs from the run without swapping.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import facts, now
from benchmarks.soak import loops, trainer
from benchmarks.soak.meters import grown
from benchmarks.soak.process import PLAIN, as_row, run_beside
from megatron.swap.common.leftovers import own_folder
from megatron.swap.common.records import write_text

TRAINED = {
    "planned": "--swap-memory-gib 0.0017 --swap-oom-guard --swap-cpu-memory-gib 1 --swap-optimizer 0.5 "
               "--swap-host-gib 0.04 --swap-disk-dir {folder}",
    "guarded": "--swap-layers 0-2 --swap-oom-guard --swap-cpu-memory-gib 0.0047 --swap-host-gib 0.02 "
               "--swap-disk-dir {folder}",
}  # fmt: skip
"""The flags of each case of Megatron's trainer."""
CYCLE = trainer.Job(trainer.LENGTHS).cycle
LEAST_CYCLES = 9  # Cycles of steps that each third has to have, behind the warm-up, together


def run_case(case: str, num_steps: int) -> dict[str, Any]:
    with own_folder("swap-soak-") as (folder, owner):
        if case in TRAINED:
            job, cycle, flags = trainer.Job(trainer.LENGTHS).to_json(), CYCLE, TRAINED[case].format(folder="FOLDER")
            given = {
                kind: [job, *trainer.flags(num_steps, folder / kind / "saved"), *words.format(folder=folder).split()]
                for kind, words in (("swapped", TRAINED[case]), ("plain", PLAIN))
            }
        else:
            cycle, flags = loops.CYCLE, "swap.activations(model.blocks, min_mib=0)"
            given = {kind: [case, f"{num_steps}", kind] for kind in ("swapped", "plain")}
        module = trainer.__name__ if case in TRAINED else loops.__name__
        found = run_beside(folder, owner, module, given)
    (swapped, samples), (plain, _) = found["swapped"], found["plain"]
    is_whole = len(swapped["losses"]) == len(plain["losses"]) == num_steps
    row = as_row(case, flags, cycle, swapped, plain, samples)
    return {**row, "losses_equal": row["losses_equal"] and is_whole}


def is_good(row: dict[str, Any]) -> bool:
    return row["losses_equal"] and row["offloaded_bytes"] > 0 and not grown(row)


def line(row: dict[str, Any]) -> str:
    more = [f"{one['metric']} {one['middle']:g} -> {one['last']:g}" for one in grown(row)]
    words = ["losses equal" if row["losses_equal"] else "LOSSES DIFFER", f"GROWS: {more}" if more else "flat"]
    counted = {"rescues": row.get("num_rescues"), "plan changes": row.get("num_plan_changes")}
    words += [f"{number} {name}" for name, number in counted.items() if number]
    return f"{row['case']}: {row['num_steps']} steps in {row['seconds']:g} s: {', '.join(words)}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    every = [*TRAINED, *loops.LOOPS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="steps of Megatron's trainer (default 10000)")
    parser.add_argument("--loop-steps", type=int, default=10_000, help="steps of the other loops (default 10000)")
    parser.add_argument("--case", nargs="+", default=every, choices=every, metavar="NAME", help="run these cases alone")
    parser.add_argument("--output", type=Path, help="also write the results as JSON, for docs/results")
    arguments = parser.parse_args(argv)
    for name, least in (("steps", LEAST_CYCLES * CYCLE), ("loop_steps", LEAST_CYCLES * loops.CYCLE)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')}: at least {least}, so that each third has whole cycles")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    rows = []
    for case in arguments.case:
        rows.append(run_case(case, arguments.steps if case in TRAINED else arguments.loop_steps))
        print(line(rows[-1]), flush=True)
        write(arguments.output, "benchmarks.soak", sys.argv[1:] if argv is None else argv, rows)
    return 0 if all(map(is_good, rows)) else 1


def write(output: Path | None, module: str, words: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    if output is not None:
        command = f"python -m {module} {' '.join(words)}".replace(str(output), "FILE")
        about = facts()
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        about["machine"]["cpu"] = next((text.partition(": ")[2] for text in lines if text.startswith("model name")), "")
        write_text(output, json.dumps({**about, "date": now(), "command": command, "rows": rows}) + "\n")

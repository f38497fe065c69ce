"""Soak: thousands of steps on a CPU, with swapping and without, and what the process holds on the way.

The cases ``planned`` and ``guarded`` train through Megatron's trainer: plans and lengths change, evaluations and
checkpoints come between, the guard rescues, optimizer state or activations lie on disk. The other cases are loops
around ``swap.activations``. Ends with status 1 if a metric grows, or if a loss differs from the run without swapping.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, facts, now
from benchmarks.runner.launch import CPU_ENVIRONMENT, LONE_RANK
from benchmarks.soak import loops, trainer
from benchmarks.soak.meters import Metrics, changes, curve, grown, read_samples
from megatron.swap.common.leftovers import own_folder
from megatron.swap.common.records import write_text

CPU = {**CPU_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
PLAIN = "--swap-layers none"
TRAINED = {
    "planned": "--swap-memory-gib 0.0017 --swap-oom-guard --swap-cpu-memory-gib 1 --swap-optimizer 0.5 "
               "--swap-host-gib 0.04 --swap-disk-dir {folder}",
    "guarded": "--swap-layers 0-2 --swap-oom-guard --swap-cpu-memory-gib 0.0047 --swap-host-gib 0.02 "
               "--swap-disk-dir {folder}",
}  # fmt: skip
"""The flags of each case of Megatron's trainer."""
CYCLE = trainer.Job(trainer.LENGTHS).cycle
LEAST_CYCLES = 9
"""Cycles of steps that each third has to have, behind the warm-up, together."""
MOST_POINTS = 200
"""Points of each curve in the result file."""


class Process:
    """A process that runs one case, beside others.

    Args:
        folder: for its files; it is made.
        owner: the descriptor of the lock of a folder around it. While the process runs, nobody removes that folder.
        module: what runs.
        arguments: behind the paths of samples and result.
        environment: variables of the device.
    """

    def __init__(
        self, folder: Path, owner: int, module: str, arguments: Sequence[str], environment: Mapping[str, str] = CPU
    ) -> None:
        folder.mkdir()
        self._folder = folder
        env = {**os.environ, **LONE_RANK, **environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
        command = [sys.executable, "-m", module, f"{folder}/samples", f"{folder}/result", *arguments]
        self._began = time.monotonic()
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=log, stderr=log, pass_fds=(owner,)
            )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> dict[str, Any]:
        """Wait for the process and return what it has found.

        Raises:
            RuntimeError: it has failed. The message has its last lines.
        """
        code = self._process.wait()
        if code:
            lines = (self._folder / "log").read_text(errors="replace").splitlines()[-30:]
            raise RuntimeError(f"{self._folder.name}: exit status {code}:\n" + "\n".join(lines))
        found = json.loads((self._folder / "result").read_text())
        return {**found, "seconds": round(time.monotonic() - self._began, 1)}

    def samples(self) -> list[dict[str, int]]:
        return read_samples(self._folder / "samples")

    def kill(self) -> bool:
        """End the process, if it has not ended. Return whether it was killed."""
        self._process.kill()
        return self._process.wait() == -signal.SIGKILL


def run_case(case: str, num_steps: int, folder: Path, owner: int) -> dict[str, Any]:
    """Run a case with swapping and without, side by side, and return its row. ``owner``: as of ``Process``."""
    if case in TRAINED:
        swap, cycle = TRAINED[case].format(folder=folder), CYCLE
        job = trainer.Job(trainer.LENGTHS)
        given = [
            (trainer.__name__, [job.to_json(), *trainer.flags(num_steps, folder / kind / "saved"), *words.split()])
            for kind, words in (("swapped", swap), ("plain", PLAIN))
        ]
        flags = TRAINED[case].format(folder="FOLDER")
    else:
        given = [(loops.__name__, [case, f"{num_steps}", kind]) for kind in ("swapped", "plain")]
        cycle, flags = loops.CYCLE, "swap.activations(model.blocks, min_mib=0)"
    processes: list[Process] = []
    try:
        for kind, (module, words) in zip(("swapped", "plain"), given, strict=True):
            processes.append(Process(folder / kind, owner, module, words))
        swapped, plain = (process.end() for process in processes)
    finally:
        for process in processes:
            process.kill()
    is_whole = len(swapped["losses"]) == len(plain["losses"]) == num_steps
    row = as_row(case, flags, cycle, swapped, plain, processes[0].samples())
    return {**row, "losses_equal": row["losses_equal"] and is_whole}


def as_row(
    case: str, flags: str, cycle: int, swapped: dict[str, Any], plain: dict[str, Any], samples: Sequence[Metrics]
) -> dict[str, Any]:
    """Return the row of a run with swapping, of its samples and of a run without. Where one has more steps, the losses
    of all steps that both have are compared."""
    losses = swapped.pop("losses")
    num_compared = min(len(losses), len(plain["losses"]))
    return {
        "case": case, "flags": flags, "num_steps": len(losses), "cycle": cycle, **swapped,
        "num_compared": num_compared,
        "losses_equal": num_compared > 0 and losses[:num_compared] == plain["losses"][:num_compared],
        "losses_sha256": hashlib.sha256("\n".join(losses).encode()).hexdigest(),
        "changes": [change.to_json() for change in changes(samples, cycle)],
        "curves": curve(samples, cycle, MOST_POINTS),
    }  # fmt: skip


def is_good(row: dict[str, Any]) -> bool:
    """Return whether a case is flat, its losses are equal, and it has moved something."""
    return row["losses_equal"] and row["offloaded_bytes"] > 0 and not grown(row)


def line(row: dict[str, Any]) -> str:
    """Return the result of a case as a line."""
    more = [f"{one['metric']} {one['middle']:g} -> {one['last']:g}" for one in grown(row)]
    words = ["losses equal" if row["losses_equal"] else "LOSSES DIFFER", f"GROWS: {more}" if more else "flat"]
    words += [f"{row[key]} {key.removeprefix('num_').replace('_', ' ')}" for key in ("num_rescues", "num_plan_changes")
            if row.get(key)]  # fmt: skip
    return f"{row['case']}: {row['num_steps']} steps in {row['seconds']:g} s: {', '.join(words)}"


def cpu_name() -> str:
    """Return the model of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((words.partition(":")[2].strip() for words in lines if words.startswith("model name")), "unknown")


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
        with own_folder("swap-soak-") as (folder, owner):
            num_steps = arguments.steps if case in TRAINED else arguments.loop_steps
            rows.append(run_case(case, num_steps, folder, owner))
        print(line(rows[-1]), flush=True)
        write(arguments.output, "benchmarks.soak", sys.argv[1:] if argv is None else argv, rows)
    return 0 if all(map(is_good, rows)) else 1


def write(output: Path | None, module: str, words: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Write the result file, if one is wanted: rows, machine, versions and command."""
    if output is not None:
        command = f"python -m {module} {' '.join(words)}".replace(str(output), "FILE")
        about = facts()
        about["machine"]["cpu"] = cpu_name()
        write_text(output, json.dumps({**about, "date": now(), "command": command, "rows": rows}) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

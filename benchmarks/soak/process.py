"""Processes of a soak, side by side, and the row of what one has found."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.runner.launch import CPU_ENVIRONMENT, LONE_RANK
from benchmarks.soak.meters import Metrics, changes, curve

CPU = {**CPU_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
PLAIN = "--swap-layers none"
MOST_POINTS = 200  # Points of each curve in the result file
POLL_S = 0.2


def run_beside(
    folder: Path, owner: int, module: str, given: Mapping[str, Sequence[str]], environment: Mapping[str, str] = CPU
) -> dict[str, tuple[dict[str, Any], list[Metrics]]]:
    env = {**os.environ, **LONE_RANK, **environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    seconds: dict[str, float] = {}
    began = time.monotonic()
    try:
        for name, words in given.items():
            own = folder / name
            own.mkdir()
            command = [sys.executable, "-m", module, f"{own}/samples", f"{own}/result", *words]
            with (own / "log").open("w") as log:
                processes[name] = subprocess.Popen(
                    command, cwd=own, env=env, stdout=log, stderr=log, pass_fds=(owner,)
                )
        while len(seconds) < len(processes):
            time.sleep(POLL_S)
            for name in processes.keys() - seconds.keys():
                code = processes[name].poll()
                if code:
                    lines = (folder / name / "log").read_text(errors="replace").splitlines()[-30:]
                    raise RuntimeError(f"{name}: exit status {code}:\n" + "\n".join(lines))
                if code == 0:
                    seconds[name] = round(time.monotonic() - began, 1)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    found: dict[str, tuple[dict[str, Any], list[Metrics]]] = {}
    for name in given:
        result = json.loads((folder / name / "result").read_text())
        samples = [json.loads(line) for line in (folder / name / "samples").read_text().splitlines()]
        found[name] = {**result, "seconds": seconds[name]}, samples
    return found


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
        "changes": changes(samples, cycle),
        "curves": curve(samples, cycle, MOST_POINTS),
    }  # fmt: skip

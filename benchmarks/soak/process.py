"""Processes of a soak, side by side, and the row of what one has found."""

from __future__ import annotations

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

from benchmarks.machine import ROOT
from benchmarks.runner.launch import CPU_ENVIRONMENT, LONE_RANK
from benchmarks.soak.meters import Metrics, changes, curve, read_samples

CPU = {**CPU_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
PLAIN = "--swap-layers none"
MOST_POINTS = 200
"""Points of each curve in the result file."""
POLL_S = 0.2


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
            self._process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, pass_fds=(owner,))

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

    def samples(self) -> list[Metrics]:
        return read_samples(self._folder / "samples")

    def kill(self) -> bool:
        """End the process, if it has not ended. Return whether it was killed."""
        self._process.kill()
        return self._process.wait() == -signal.SIGKILL


def run_beside(
    folder: Path, owner: int, given: Mapping[str, tuple[str, Sequence[str]]], environment: Mapping[str, str] = CPU
) -> dict[str, tuple[dict[str, Any], list[Metrics]]]:
    """Run processes (module and arguments by name) side by side; return what each has found, and its samples.

    Raises:
        RuntimeError: one has failed; the others are ended.
    """
    processes: dict[str, Process] = {}
    results: dict[str, dict[str, Any]] = {}
    try:
        for name, (module, words) in given.items():
            processes[name] = Process(folder / name, owner, module, words, environment)
        while len(results) < len(processes):
            time.sleep(POLL_S)
            for name in processes.keys() - results.keys():
                if processes[name].has_ended:
                    results[name] = processes[name].end()
    finally:
        for process in processes.values():
            process.kill()
    return {name: (results[name], processes[name].samples()) for name in processes}


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

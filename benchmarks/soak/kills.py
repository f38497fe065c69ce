"""Kills runs of Megatron's trainer at random moments, and trains on from what they leave: ``… .kills --count 50``.

Each run saves after every step, and has activations in host memory and optimizer state on disk. Every kill must leave
an empty disk folder and a checkpoint from which the next run ends with the losses of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak import trainer
from benchmarks.soak.process import PLAIN, Process
from megatron.swap.common.leftovers import own_folder

NUM_STEPS = 40
SWAP = "--swap-layers all --swap-optimizer 0.5 --swap-host-gib 0.04 --swap-disk-dir {disk}"


def flags(saved: Path, swap: str) -> list[str]:
    """Return the flags of a run whose checkpoints go to ``saved``, one each step."""
    job = trainer.Job(trainer.LENGTHS).to_json()
    return [job, *trainer.flags(NUM_STEPS, saved), "--save-interval", "1", *swap.split()]


def saved_step(saved: Path) -> int:
    """Return the step of the last checkpoint; 0: there is none.

    Megatron-LM empties the file that names it before it writes the next number. If a kill came between, the newest
    checkpoint is whole, and its number is written here, as a user would.
    """
    tracker = saved / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return 0
    if not tracker.read_text():
        newest = max(path.name for path in saved.iterdir() if path.is_dir())
        tracker.write_text(f"{int(newest.removeprefix('iter_'))}")
    return int(tracker.read_text())


def kill_one(folder: Path, owner: int, moment_s: float, expected: list[str]) -> dict[str, Any] | None:
    """Kill a run after ``moment_s``, train on, and return what was found; ``None``: the run had ended before.

    Args:
        folder: for all files.
        owner: as of ``Process``.
        moment_s: seconds after the start.
        expected: the losses of all steps.
    """
    folder.mkdir()
    disk, saved = folder / "disk", folder / "saved"
    disk.mkdir()
    swap = SWAP.format(disk=disk)
    killed = Process(folder / "killed", owner, trainer.__name__, flags(saved, swap))
    time.sleep(moment_s)
    if not killed.kill():
        return None
    step = saved_step(saved)
    left = sorted(path.name for path in disk.iterdir())
    load = ["--load", f"{saved}"] if step else []
    went_on = Process(folder / "next", owner, trainer.__name__, [*flags(saved, swap), *load]).end()
    is_equal = went_on["losses"] == expected[step:]
    return {"moment_s": round(moment_s, 3), "saved_step": step, "left": left, "is_equal": is_equal}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="number of kills (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    arguments = parser.parse_args(argv)
    moments = random.Random(arguments.seed)
    num_started = num_killed = num_bad = 0
    with own_folder("swap-kills-") as (folder, owner):
        plain = Process(folder / "plain", owner, trainer.__name__, flags(folder / "saved", PLAIN)).end()
        while num_killed < arguments.count:
            num_started += 1
            moment_s = moments.uniform(0.0, plain["seconds"])  # a run with swapping is hardly shorter
            found = kill_one(folder / f"{num_started}", owner, moment_s, plain["losses"])
            if found is None:
                print(f"run {num_started} had ended before {moment_s:.3f} s: not counted", flush=True)
                continue
            num_killed += 1
            num_bad += not found["is_equal"] or bool(found["left"])
            print(f"run {num_started} killed by {signal.SIGKILL.name}: {found}", flush=True)
    return 1 if num_bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Train the framework examples without swapping, within a budget and by layers, and compare the three.

    python -m benchmarks.frameworks swap_megatron_bridge swap_mcore_bridge --output frameworks.json
    python -m benchmarks.frameworks swap_mcore_bridge --budget-gib 24 --times --output frameworks.json

needs a GPU and the frameworks of docs/guide/frameworks.md. Runs are deterministic, and losses and gradient norms are
compared to the last digit; with --times they are not deterministic, and only memory and step times are comparable. Each
run is added to the output as soon as it has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, facts, now
from megatron.swap.common.records import write_text

EXAMPLES = ("swap_megatron_bridge", "swap_mcore_bridge")
PACKAGES = ("megatron-bridge", "mcore-bridge")
STEP = re.compile(r"step (\d+): loss ([\d.einf+-]+), gradient norm ([\d.einf+-]+), (\d+) ms, ([\d.]+) GiB")
NUM_LAST = 4
"""Steps at the end whose median time is reported: the planner is stable by then."""


def steps_of(output: str) -> list[dict[str, Any]]:
    """Return the steps that an example has printed."""
    return [
        {"step": int(step), "loss": loss, "grad_norm": norm, "ms": int(ms), "reserved_gib": float(gib)}
        for step, loss, norm, ms, gib in STEP.findall(output)
    ]


def row_of(words: list[str], output: str, returncode: int, num_steps: int) -> dict[str, Any]:
    """Return a run's row.

    Args:
        words: its command.
        output: what it printed.
        returncode: of its process.
        num_steps: steps that it should have trained.
    """
    steps = steps_of(output)
    stats = re.findall(r"BuiltStats\(.*\)|^\d+ steps?: .* of host memory.*$", output, re.MULTILINE)
    is_done = returncode == 0 and len(steps) == num_steps
    return {
        "command": shlex.join(words), "outcome": "ok" if is_done else "failed", "returncode": returncode,
        "reserved_gib": max((step["reserved_gib"] for step in steps), default=None),
        "step_ms": statistics.median(step["ms"] for step in steps[-NUM_LAST:]) if is_done else None,
        "losses": [step["loss"] for step in steps], "grad_norms": [step["grad_norm"] for step in steps],
        "stats": stats[-1] if stats else None, "output_tail": None if is_done else output[-3000:],
    }  # fmt: skip


def compare(rows: list[dict[str, Any]]) -> None:
    """Say in each row of an example whether its losses and gradient norms are those of the first, unswapped one."""
    plain = rows[0]
    for row in rows:
        both = plain["outcome"] == row["outcome"] == "ok"
        row["is_equal"] = (
            (row["losses"], row["grad_norms"]) == (plain["losses"], plain["grad_norms"]) if both else None
        )


def run(words: list[str], time_limit_s: float) -> tuple[str, int]:
    """Run a command and return its output and its exit status."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=time_limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        return printed.decode(errors="replace") if isinstance(printed, bytes) else printed, 124
    return done.stdout, done.returncode


def versions() -> dict[str, str | None]:
    """Return the versions of the frameworks; null: not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the examples and write their rows; return 1 if one failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="+", help=f"scripts of examples/: {', '.join(EXAMPLES)}")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--budget-gib", type=float, default=22.0)
    parser.add_argument("--layers", default="0-11")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--times", action="store_true", help="the fastest kernels, deterministic or not")
    parser.add_argument("--shims", default="", help="what stands in for packages that are missing; kept in the file")
    parser.add_argument("--time-limit-s", type=float, default=170.0, help="of each run")
    options = parser.parse_args(arguments)

    content: dict[str, Any] = {**facts(), "date": now(), "frameworks": versions(), "shims": options.shims, "rows": []}
    for example in options.examples:
        rows: list[dict[str, Any]] = []
        for more in ([], ["--memory-gib", f"{options.budget_gib:g}"], ["--layers", options.layers]):
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
                     f"examples/{example}.py", "--steps", str(options.steps), *more,
                     *([] if options.times else ["--deterministic"])]  # fmt: skip
            output, returncode = run(words, options.time_limit_s)
            row = row_of(["python", *words[1:]], output, returncode, options.steps)
            budget_gib = options.budget_gib if "--memory-gib" in more else None
            rows.append({"example": example, "budget_gib": budget_gib, **row})
            compare(rows)
            said = {name: row[name] for name in ("outcome", "reserved_gib", "step_ms")}
            print(f"{example} {' '.join(more) or 'unswapped'}: {said}, equal: {rows[-1]['is_equal']}", flush=True)
            write_text(options.output, json.dumps({**content, "rows": content["rows"] + rows}, indent=1) + "\n")
        content["rows"] += rows
    bad = [row for row in content["rows"] if row["outcome"] != "ok" or not (options.times or row["is_equal"])]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

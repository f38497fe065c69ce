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
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, facts, now, versions
from megatron.swap.common.records import write_text

EXAMPLES = ("swap_megatron_bridge", "swap_mcore_bridge")
PACKAGES = ("megatron-bridge", "mcore-bridge")
STEP = re.compile(r"step \d+: loss ([\d.einf+-]+), gradient norm ([\d.einf+-]+), (\d+) ms, ([\d.]+) GiB")
STATS = re.compile(r"(?:Built)?Stats\(.*\)|^\d+ steps?: .* (?:of|in) host memory.*$", re.MULTILINE)
NUM_LAST = 4
"""Steps at the end whose median time is reported: the planner is stable by then."""


def row_of(words: list[str], output: str, returncode: int, num_steps: int) -> dict[str, Any]:
    """Return the row of a run, which printed ``output`` and should have trained ``num_steps``."""
    steps, stats = STEP.findall(output), STATS.findall(output)
    is_done = returncode == 0 and len(steps) == num_steps
    return {
        "command": shlex.join(words), "outcome": "ok" if is_done else "failed", "returncode": returncode,
        "reserved_gib": max((float(gib) for *_, gib in steps), default=None),
        "step_ms": statistics.median(int(ms) for _, _, ms, _ in steps[-NUM_LAST:]) if is_done else None,
        "losses": [loss for loss, *_ in steps], "grad_norms": [norm for _, norm, *_ in steps],
        "stats": stats[-1] if stats else None, "output_tail": None if is_done else output[-3000:],
    }  # fmt: skip


def is_equal(row: dict[str, Any], plain: dict[str, Any]) -> bool | None:
    """Return whether losses and gradient norms are those of the unswapped run; ``None``: one of the two failed."""
    if not plain["outcome"] == row["outcome"] == "ok":
        return None
    return bool((row["losses"], row["grad_norms"]) == (plain["losses"], plain["grad_norms"]))


def run(words: list[str], time_limit_s: float) -> tuple[str, int]:
    """Run a command and return its output and its exit status."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    limited = ["timeout", "-k", "10", f"{time_limit_s:g}", *words]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(limited, cwd=ROOT, env=env, text=True, errors="replace", check=False, **pipe)  # type: ignore[call-overload]
    return done.stdout, done.returncode


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
    rows: list[dict[str, Any]] = []
    about = {**facts(), "date": now(), "frameworks": versions(PACKAGES), "shims": options.shims}
    for example in options.examples:
        plain: dict[str, Any] | None = None
        for more in ([], ["--memory-gib", f"{options.budget_gib:g}"], ["--layers", options.layers]):
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", f"examples/{example}.py",
                     "--steps", str(options.steps), *more, *([] if options.times else ["--deterministic"])]  # fmt: skip
            output, returncode = run([sys.executable, *words], options.time_limit_s)
            row = {"example": example, "budget_gib": options.budget_gib if "--memory-gib" in more else None}
            row |= row_of(["python", *words], output, returncode, options.steps)
            plain = plain or row
            row["is_equal"] = is_equal(row, plain)
            said = {name: row[name] for name in ("outcome", "reserved_gib", "step_ms")}
            print(f"{example} {' '.join(more) or 'unswapped'}: {said}, equal: {row['is_equal']}", flush=True)
            rows.append(row)
            write_text(options.output, json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return int(any(row["outcome"] != "ok" or not (options.times or row["is_equal"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())

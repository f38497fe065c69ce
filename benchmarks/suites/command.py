"""Compare every way of saving activation memory: same model, data and seed, each run in a separate process.

    python tools/bench.py --suite quick
    python tools/bench.py --suite h200-dense --case L16-h4096 --method none full-recompute ours-0-3 --output dense.jsonl
    python tools/bench.py --suite h200-dense --resume --time-limit-s 540 --output dense.jsonl
    python tools/bench.py --suite h200-dense --list

Rows are written as runs end, without --output to runs/SUITE.jsonl; a Markdown table and a picture beside them: step
time against peak memory, or, for a suite on the CPU, what autograd holds at the peak. Exit status: 0 all done; 1 a run
failed, timed out, could not begin or was timed before its plan was stable; 75 runs are left (continue with --resume);
130 interrupted (finished runs are kept).
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
from benchmarks.rows import NOT_READY, NOT_STABLE, RowError, peak_gib
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
from benchmarks.suites.picture import draw
from benchmarks.suites.progress import Display
from benchmarks.suites.results import SuiteResults
from benchmarks.suites.runner import items, measure
from benchmarks.suites.saved_picture import draw_saved
from benchmarks.suites.suite import Suite, SuiteError, find_suite, load_suite, suite_names
from benchmarks.suites.table import counts_saved, markdown
from megatron.swap.common.flags import CommandLine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; an error is printed as one line.

    Args:
        arguments: the command-line arguments; `None`: those of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", required=True, help=f"{', '.join(suite_names())}, or a .toml file")
    parser.add_argument("--case", nargs="+", default=[], help="only these cases")
    parser.add_argument("--method", nargs="+", default=[], help="only these methods")
    parser.add_argument("--rounds", type=int, help="number of rounds (default: the suite's)")
    add_options(parser, default="SUITE.jsonl", row="case and method")
    parser.add_argument("--list", action="store_true", help="print cases and methods with their flags, run nothing")
    options = parser.parse_args(arguments)
    check_options(parser, options, f"{Path(options.suite).stem}.jsonl")
    signal.signal(signal.SIGTERM, interrupt)
    try:
        suite = load_suite(find_suite(options.suite))
        chosen = suite.chosen(options.case, options.method, options.rounds)
        if options.list:
            show(chosen)
            return 0
        check_beside(options.output)
        with locked(options.output):
            return bench(suite, chosen, options, shlex.join(["python", "tools/bench.py", *arguments]))
    except (SuiteError, RowError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before the first run", flush=True)
        return INTERRUPTED


def show(suite: Suite) -> None:
    """Print cases and methods with their flags."""
    print(f"{suite.name}: {suite.description}")
    for case in suite.cases:
        print(f"\n{case.name} ({case.rounds} rounds)")
        for method in case.methods:
            env = "".join(f"{name}={value} " for name, value in {**case.env, **method.piece.env}.items())
            print(f"  {method.name}: {method.what}\n      {env}{' '.join((*case.flags, *method.piece.flags))}")


def bench(suite: Suite, chosen: Suite, options: argparse.Namespace, command: str) -> int:
    """Run the chosen part of a suite, write its table and picture, and return the exit status.

    Raises:
        SuiteError: the suite needs a GPU and there is none.
        StoreError, RowError: the output file cannot be continued.
    """
    facts = machine.facts()
    if suite.on_gpu and facts["machine"]["gpu"] == "none":
        raise SuiteError(f"suite {suite.name} needs a GPU, and this machine has none; --suite quick runs on the CPU")
    results = SuiteResults(suite, options.output, facts, command, resume=options.resume)
    todo = [item for item in items(chosen) if not results.is_done(item.case, item.method, item.number)]
    print(f"{suite.name}: {len(todo)} runs to do, into {options.output}", flush=True)

    def measure_suite() -> bool:
        with Display(todo) as display:
            return measure(chosen, results, time_limit_s=options.time_limit_s, on_done=display.done)

    status = measure_all(measure_suite)
    rows = results.rows()
    if rows:
        has_peaks = any(peak_gib(row) is not None for row in rows)
        drawn = draw_saved if counts_saved(rows) else draw
        write_pages(options.output, markdown(rows), partial(drawn, rows) if has_peaks else None)
    has_failed = print_failed(rows, ("timeout", NOT_READY, NOT_STABLE))
    return status or int(has_failed)


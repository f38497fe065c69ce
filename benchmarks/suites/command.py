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

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import machine
from benchmarks.rows import NOT_READY, NOT_STABLE, Row, peak_gib
from benchmarks.runner.grid import run_grid
from benchmarks.runner.program import add_options, check_options, guarded, new_parser
from benchmarks.store import check_beside, locked
from benchmarks.suites.picture import draw, draw_saved
from benchmarks.suites.results import SuiteResults
from benchmarks.suites.suite import Suite, SuiteError, load_suite, suite_names
from benchmarks.suites.table import counts_saved, markdown


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = new_parser(__doc__)
    parser.add_argument("--suite", required=True, help=f"{', '.join(suite_names())}, or a .toml file")
    parser.add_argument("--case", nargs="+", default=[], help="only these cases")
    parser.add_argument("--method", nargs="+", default=[], help="only these methods")
    parser.add_argument("--rounds", type=int, help="number of rounds (default: the suite's)")
    add_options(parser, default="SUITE.jsonl", row="case and method")
    parser.add_argument("--list", action="store_true", help="print cases and methods with their flags, run nothing")
    options = parser.parse_args(arguments)
    check_options(parser, options, f"{Path(options.suite).stem}.jsonl")
    command = shlex.join(["python", "tools/bench.py", *arguments])
    return guarded(lambda: run(options, command))


def run(options: argparse.Namespace, command: str) -> int:
    suite = load_suite(options.suite)
    chosen = suite.chosen(options.case, options.method, options.rounds)
    if options.list:
        show(chosen)
        return 0
    check_beside(options.output)
    with locked(options.output):
        facts = machine.facts()
        if suite.on_gpu and facts["machine"]["gpu"] == "none":
            raise SuiteError(f"suite {suite.name} needs a GPU, and there is none; --suite quick runs on the CPU")
        results = SuiteResults(suite, chosen, options.output, facts, command, resume=options.resume)
        print(f"{suite.name}: {results.num_left()} runs to do, into {options.output}", flush=True)
        bad = ("timeout", NOT_READY, NOT_STABLE)
        return run_grid(results, options.output, options.time_limit_s, markdown, drawn, bad)


def drawn(rows: Sequence[Row]) -> Figure | None:
    if not any(map(peak_gib, rows)):
        return None
    return draw_saved(rows) if counts_saved(rows) else draw(rows)


def show(suite: Suite) -> None:
    print(f"{suite.name}: {suite.description}")
    for case in suite.cases:
        print(f"\n{case.name} ({case.rounds} rounds)")
        for method in case.methods:
            env = "".join(f"{name}={value} " for name, value in {**case.env, **method.piece.env}.items())
            print(f"  {method.name}: {method.what}\n      {env}{' '.join((*case.flags, *method.piece.flags))}")

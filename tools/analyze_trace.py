"""Check a trace of a swapping run: the order and number of copies, and how much of them compute hid.

Reads a trace of torch.profiler or Nsight Systems (tools/profile.sh makes both), prints the findings and saves beside
the trace: findings.json, copies.csv, and trace.perfetto.json.gz for https://ui.perfetto.dev.

Exit status: 0 clean; 1 a copy is out of order, differs from the summary or (with --about) is much slower than the
link alone; 2 the trace cannot be analysed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.traces.analysis import analyse  # noqa: E402
from benchmarks.traces.reader import read_trace  # noqa: E402
from benchmarks.traces.records import TraceError  # noqa: E402
from benchmarks.traces.report import OUTPUT_FILES, lines, save  # noqa: E402
from megatron.swap.common.flags import CommandLine  # noqa: E402
from megatron.swap.common.records import read_text  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="rank-N.json[.gz] of torch.profiler, or a .sqlite file of nsys export")
    parser.add_argument("--summary", type=Path, metavar="RUN.JSON", help="the --swap-summary file of the same run")
    parser.add_argument(
        "--about", type=Path, metavar="FILE.JSON", help="output of `python -m benchmarks.machine` on that machine"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where files go (default: beside the trace)")
    options = parser.parse_args(arguments)
    folder = options.output or options.trace.parent
    try:
        _check_inputs([path for path in (options.trace, options.summary, options.about) if path], folder)
        about = _read("--about", options.about, "what `python -m benchmarks.machine` prints")
        summary = _read("--summary", options.summary, "a summary that --swap-summary wrote")
        if summary is not None and not isinstance(summary.get("steps"), list):
            raise TraceError(f"--summary {options.summary}: not a summary that --swap-summary wrote: it has no 'steps'")
        link = (about or {}).get("link")
        analysis = analyse(read_trace(options.trace), summary, min(link.values()) if link else None)
        print(*lines(analysis), sep="\n")
        saved = save(analysis, folder, about)
    except TraceError as error:
        print(f"analyze_trace: {error}", file=sys.stderr)
        return 2
    print("saved: " + ", ".join(str(path) for path in saved))
    return 0 if analysis.is_clean else 1


def _check_inputs(inputs: Sequence[Path], folder: Path) -> None:
    """Raise `TraceError` if an input file would be overwritten by an output file."""
    outputs = {(folder / name).resolve(): name for name in OUTPUT_FILES}
    for path in inputs:
        if path.resolve() in outputs:
            raise TraceError(f"{path}: {outputs[path.resolve()]} is written there; name another --output folder")


def _read(option: str, path: Path | None, what: str) -> dict[str, Any] | None:
    """Return the JSON object of an option's file; `None`: the option is not given."""
    if path is None:
        return None
    try:
        return dict(json.loads(read_text(path)))
    except (OSError, ValueError, TypeError) as error:
        raise TraceError(f"{option} {path}: not {what}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())

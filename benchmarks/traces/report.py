"""Print and save an analysis."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.traces.analysis import Analysis, findings
from benchmarks.traces.checks import UNJUDGED
from benchmarks.traces.perfetto import write_perfetto
from benchmarks.traces.records import MS
from benchmarks.traces.tables import findings_table, gaps_table, order_table, time_table
from megatron.swap.common.types import format_bytes

NUM_SHOWN = 20  # Maximum number of violations and mismatches that are printed; findings.json has all
COPY_COLUMNS = (
    "step", "group", "site", "direction", "bytes", "gb_per_s", "start_ms", "end_ms", "stream", "launch_ms", "why"
)  # fmt: skip
OUTPUT_FILES = ("findings.json", "copies.csv", "trace.perfetto.json.gz")  # Files that `save` writes


def lines(analysis: Analysis) -> Iterator[str]:
    found = findings(analysis)
    for table in (time_table([found]), findings_table([found]), order_table(found)):
        yield f"{table.aligned}\n"
    if found["gaps"]:
        yield f"Largest gaps of compute\n{gaps_table(found).aligned}\n"
    yield from _remarks(analysis, found)
    violations = [str(violation) for violation in analysis.ordering.violations]
    for title, sentences in (("MISMATCHES", analysis.mismatches), ("OUT OF ORDER", violations)):
        if sentences:
            yield f"{title}: {len(sentences)}"
            yield from (f"  {sentence}" for sentence in sentences[:NUM_SHOWN])
            if len(sentences) > NUM_SHOWN:
                yield f"  … {len(sentences) - NUM_SHOWN} more in findings.json"
    if analysis.is_clean:
        equal = "; number and bytes match the summary" if analysis.compared else ""
        yield f"clean: every copy ran in order{equal}"


def _remarks(analysis: Analysis, found: dict[str, Any]) -> Iterator[str]:
    for why, number in found["reuse_not_judged"].items():
        if number:
            yield f"{number} copies out are not judged by 'out_before_reuse': {UNJUDGED[why]}"
    streams = found["streams"]
    yield (
        f"streams: {streams['num_compute']} compute (main: {streams['main']}), copies out on {streams['copies_out']}, "
        f"in on {streams['copies_in']}"
    )
    stalled = found["stalled_ms"]
    by_what = ", ".join(f"{what} {stalled[what]:.1f} ms" for what in ("wait", "release"))
    yield f"compute waited for copies: {stalled['together']:.1f} ms ({by_what})"
    for direction, other in found["foreign_copies"].items():
        yield f"other copies {direction}: {other['num_copies']}, {format_bytes(other['num_bytes'])}"
    if unknown := len(analysis.compute.main) - analysis.compute.num_ordered:
        yield f"{unknown} kernels have no launch in the trace: not used for ordering"
    if not found["compared_with_summary"]:
        yield "no --summary given: copies were not compared with the engine's own counts"


def copy_rows(analysis: Analysis) -> Iterator[tuple[object, ...]]:
    """Yield every swap copy in launch order, with times in ms since the first traced step began on the host."""
    engine = analysis.engine
    origin_ns = engine.steps[0].start_ns
    for copy in engine.copies:
        step = engine.step_at(copy.at.start_ns)
        for piece in copy.pieces:
            moments = (piece.start_ns, piece.end_ns, piece.launch_ns)
            start_ms, end_ms, launch_ms = (f"{(moment - origin_ns) / MS:.6f}" for moment in moments)
            yield (
                "" if step is None else step.number, copy.group, copy.site, copy.direction, piece.num_bytes,
                f"{piece.gb_per_s:.3f}", start_ms, end_ms, piece.stream, launch_ms, copy.why,
            )  # fmt: skip


def save(analysis: Analysis, folder: Path, about: dict[str, Any] | None = None) -> list[Path]:
    """Write findings (with ``about`` the machine), copies and Perfetto trace, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    found, copies, perfetto = (folder / name for name in OUTPUT_FILES)
    found.write_text(json.dumps({"about": about, **findings(analysis)}, indent=1) + "\n")
    with copies.open("w", newline="") as file:
        csv.writer(file).writerows([COPY_COLUMNS, *copy_rows(analysis)])
    write_perfetto(analysis, perfetto)
    return [found, copies, perfetto]

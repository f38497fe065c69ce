"""Print and save an analysis."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.stamp import stamp
from benchmarks.traces.analysis import Analysis, findings
from benchmarks.traces.checks import RULES, UNJUDGED
from benchmarks.traces.figures import stalled_ms
from benchmarks.traces.perfetto import write_perfetto
from benchmarks.traces.picture import draw
from benchmarks.traces.records import MS
from benchmarks.traces.scene import scene_of
from megatron.swap.common.types import format_bytes

NUM_SHOWN = 20
"""Maximum number of violations and mismatches that are printed; findings.json has all."""

NAMES = {"out": "out (D2H)", "in": "in (H2D)"}
COPY_COLUMNS = (
    "step", "group", "site", "direction", "bytes", "gb_per_s", "start_ms", "end_ms", "stream", "launch_ms", "why"
)  # fmt: skip


def print_report(analysis: Analysis, console: Console) -> None:
    """Print figures first, the verdict last."""
    console.print(_steps_table(analysis))
    console.print(_link_table(analysis))
    console.print(_checks_table(analysis))
    if analysis.gaps:
        console.print(_gaps_table(analysis))
    for line in _remarks(analysis):
        console.print(f" {line}", highlight=False)
    _print_verdict(analysis, console)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=True)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _steps_table(analysis: Analysis) -> Table:
    table = _table(
        "Steps", "step", "ms", "compute ms", "out ms", "in ms", "stalled ms", "copies out", "copies in", "memory peak"
    )
    for step in analysis.steps:
        peak = "-" if step.peak_memory_bytes is None else format_bytes(step.peak_memory_bytes)
        copies = step.copies
        table.add_row(
            str(step.step), f"{step.duration_ms:.1f}", f"{step.compute_busy_ms:.1f}", f"{step.d2h_ms:.1f}",
            f"{step.h2d_ms:.1f}", f"{step.stalled_ms:.1f}",
            f"{copies.num_out_copies}, {format_bytes(copies.swapped_out_bytes)}",
            f"{copies.num_in_copies}, {format_bytes(copies.swapped_in_bytes)}", peak,
        )  # fmt: skip
    return table


def _link_table(analysis: Analysis) -> Table:
    table = _table("Link", "direction", "copies", "bytes", "GB/s", "busy of step", "hidden", "predicted")
    for way, link in analysis.links.items():
        speed = "-" if link.gb_per_s is None else f"{link.gb_per_s:.1f}"
        table.add_row(
            NAMES[way], str(link.num_copies), format_bytes(link.num_bytes), speed, percent(link.busy_share),
            percent(link.hidden_share), percent(analysis.predicted[way]),
        )  # fmt: skip
    table.add_row("both", "", "", "", "", percent(analysis.hidden_share), "")
    return table


def _checks_table(analysis: Analysis) -> Table:
    ordering = analysis.ordering
    table = _table("Order", "rule", "checked", "broken", "least margin µs")
    for rule, text in RULES.items():
        margin = ordering.least_margin_us[rule]
        broken = sum(violation.rule == rule for violation in ordering.violations)
        shown = "-" if margin is None else f"{margin:.1f}"
        table.add_row(text, str(ordering.num_checked[rule]), str(broken), shown)
    return table


def _gaps_table(analysis: Analysis) -> Table:
    table = _table("Largest gaps of compute", "cause", "step", "at ms", "ms", "of it stalled ms")
    for gap in analysis.gaps:
        table.add_row(escape(gap.owner), str(gap.step), f"{gap.start_ms:.1f}", f"{gap.ms:.2f}", f"{gap.stalled_ms:.2f}")
    return table


def _remarks(analysis: Analysis) -> Iterator[str]:
    found = findings(analysis)
    storages, streams = found["storages"], found["streams"]
    yield (
        f"storages: {storages['num_copied_out']} copied out, {storages['num_returned']} returned "
        f"({storages['num_late']} late); copied but not released: {storages['num_overtaken']} overtaken by backward, "
        f"{storages['num_stayed']} kept (memory still referenced elsewhere)"
    )
    for why, number in analysis.ordering.reuse_not_judged.items():
        if number:
            yield f"{number} copies out are not judged by 'out_before_reuse': {UNJUDGED[why]}"
    yield (
        f"streams: {streams['num_compute']} compute (main: {streams['main']}), copies out on {streams['copies_out']}, "
        f"in on {streams['copies_in']}"
    )
    by_what = ", ".join(f"{what} {found['stalled_ms'][what]:.1f} ms" for what in ("wait", "release"))
    yield f"compute waited for copies: {stalled_ms(analysis.stalls):.1f} ms ({by_what})"
    for direction, other in found["foreign_copies"].items():
        yield f"other copies {direction}: {other['num_copies']}, {format_bytes(other['num_bytes'])}"
    if analysis.compute.num_ordered < len(analysis.compute.main):
        unknown = len(analysis.compute.main) - analysis.compute.num_ordered
        yield f"{unknown} of {len(analysis.compute.main)} kernels have no launch in the trace: not used for ordering"
    if not analysis.compared:
        yield "no --summary given: copies were not compared with the engine's own counts"


def _print_verdict(analysis: Analysis, console: Console) -> None:
    """Print the mismatches and violations, or that there are none."""
    violations = [str(violation) for violation in analysis.ordering.violations]
    for title, sentences in (("MISMATCHES", analysis.mismatches), ("OUT OF ORDER", violations)):
        if sentences:
            console.print(f" [bold red]{title}: {len(sentences)}[/]", highlight=False)
            for sentence in sentences[:NUM_SHOWN]:
                console.print(f"   {escape(sentence)}", highlight=False, soft_wrap=True)
            if len(sentences) > NUM_SHOWN:
                console.print(f"   … {len(sentences) - NUM_SHOWN} more in findings.json", highlight=False)
    if analysis.is_clean:
        equal = "; number and bytes match the summary" if analysis.compared else ""
        console.print(f" [bold green]clean[/]: every copy ran in order{equal}", highlight=False)


def percent(share: float | None) -> str:
    """Format ``0.954`` as ``95.4 %``, and ``None`` as ``-``."""
    return "-" if share is None else f"{100 * share:.1f} %"


def copy_rows(analysis: Analysis) -> Iterator[dict[str, Any]]:
    """Yield every swap copy in launch order, with times in ms since the first traced step began on the host."""
    engine = analysis.engine
    origin_ns = engine.steps[0].start_ns
    for copy in engine.copies:
        step = engine.step_at(copy.at.start_ns)
        for piece in copy.pieces:
            moments = (piece.start_ns, piece.end_ns, piece.launch_ns)
            start_ms, end_ms, launch_ms = (f"{(moment - origin_ns) / MS:.6f}" for moment in moments)
            values = (
                "" if step is None else step.number, copy.group, copy.site, copy.direction, piece.num_bytes,
                f"{piece.gb_per_s:.3f}", start_ms, end_ms, piece.stream, launch_ms, copy.why,
            )  # fmt: skip
            yield dict(zip(COPY_COLUMNS, values, strict=True))


OUTPUT_FILES = ("findings.json", "copies.csv", "step.png", "trace.perfetto.json.gz")
"""Files that ``save`` writes."""


def save(analysis: Analysis, folder: Path, step: int | None = None, about: dict[str, Any] | None = None) -> list[Path]:
    """Write findings, copies, picture (of ``step``, by default the last one) and Perfetto trace; return their paths.

    ``about``: machine, versions, commit and command of the traced run, kept with the findings.
    """
    scene = scene_of(analysis, step)
    folder.mkdir(parents=True, exist_ok=True)
    found, copies, picture, perfetto = (folder / name for name in OUTPUT_FILES)
    found.write_text(json.dumps({"about": about, **findings(analysis)}, indent=1) + "\n")
    with copies.open("w", newline="") as file:
        writer = csv.DictWriter(file, COPY_COLUMNS)
        writer.writeheader()
        writer.writerows(copy_rows(analysis))
    draw(analysis, scene, picture)
    stamp(picture, hashlib.sha256(found.read_bytes()).hexdigest())
    write_perfetto(analysis, perfetto)
    return [found, copies, picture, perfetto]

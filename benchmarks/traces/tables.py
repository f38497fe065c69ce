"""The tables of findings: what ``tools/analyze_trace.py`` prints and the report shows."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.rows import GIB
from benchmarks.table import Table, cell_gib, cell_ms, cell_number, cell_share
from benchmarks.traces.checks import RULES, UNJUDGED

Findings = dict[str, Any]
PROFILERS = {"nsys": "Nsight Systems", "kineto": "torch.profiler"}
NUM_GAPS = 5
Lines = Mapping[str, Callable[[Findings], str]]


def profiler(found: Findings) -> str:
    return PROFILERS[found["format"]] + (", emulated device" if found["emulated"] else "")


def num_checks(found: Findings) -> int:
    return sum(check["num_checked"] for check in found["checks"].values())


def findings_table(columns: Sequence[Findings]) -> Table:
    lines: Lines = {
        "steps traced": lambda found: cell_number(len(found["steps"])),
        "ordering checks made": lambda found: cell_number(num_checks(found)),
        "violations": lambda found: cell_number(len(found["violations"])),
        "counts and bytes equal to the run's summary": _matches,
        "storages copied out": lambda found: cell_number(found["storages"]["num_copied_out"]),
        "of them overtaken by backward": lambda found: cell_number(found["storages"]["num_overtaken"]),
        "of them kept: memory still referenced elsewhere": lambda found: cell_number(found["storages"]["num_stayed"]),
    }
    unjudged: Lines = {
        f"reuse not judged: {text}": lambda found, why=why: cell_number(found["reuse_not_judged"][why])  # type: ignore[misc]
        for why, text in UNJUDGED.items()
    }
    late: Lines = {"reloaded late": lambda found: cell_number(found["storages"]["num_late"])}
    together: Lines = {
        "all copies: hidden under compute": lambda found: cell_share(found["hidden_share"]),
        "compute stalled by copies, ms a step": lambda found: cell_ms(_a_step(found, "stalled_ms")),
    }
    of_links = {**_of_link("out", "copies out"), **_of_link("in", "copies in")}
    return _table("", columns, {**lines, **unjudged, **late, **of_links, **together})


def _of_link(way: str, name: str) -> Lines:
    return {
        f"{name}: number": lambda found: cell_number(found["link"][way]["num_copies"]),
        f"{name}: GiB": lambda found: cell_gib(found["link"][way]["num_bytes"] / GIB),
        f"{name}: GB/s while copying": lambda found: cell_ms(found["link"][way]["gb_per_s"]),
        f"{name}: share of the steps' time": lambda found: cell_share(found["link"][way]["busy_share"]),
        f"{name}: hidden under compute": lambda found: cell_share(found["link"][way]["hidden_share"]),
        f"{name}: hidden, predicted": lambda found: cell_share(found["predicted_hidden_share"][way]),
    }


def time_table(columns: Sequence[Findings]) -> Table:
    return _table("ms a step", columns, {
        "step": lambda found: cell_ms(_a_step(found, "duration_ms")),
        "compute busy": lambda found: cell_ms(_a_step(found, "compute_busy_ms")),
        "compute stalled by copies": lambda found: cell_ms(_a_step(found, "stalled_ms")),
        "compute idle otherwise (host, launch gaps)": lambda found: cell_ms(_rest_ms(found)),
        "copies out running": lambda found: cell_ms(_a_step(found, "d2h_ms")),
        "copies in running": lambda found: cell_ms(_a_step(found, "h2d_ms")),
        "peak memory in the traced steps, GiB": _peak_gib,
    })  # fmt: skip


def gaps_table(found: Findings) -> Table:
    return Table.of(found["gaps"][:NUM_GAPS], {
        "step": lambda gap: cell_number(gap["step"]),
        "gap, ms": lambda gap: cell_ms(gap["ms"]),
        "of it waiting for copies, ms": lambda gap: cell_ms(gap["stalled_ms"]),
        "cause": lambda gap: f"`{gap['owner']}`",
    })  # fmt: skip


def order_table(found: Findings) -> Table:
    return Table.of(found["checks"].items(), {
        "rule": lambda pair: RULES[pair[0]],
        "checked": lambda pair: cell_number(pair[1]["num_checked"]),
        "broken": lambda pair: cell_number(sum(one["rule"] == pair[0] for one in found["violations"])),
        "least margin µs": lambda pair: cell_ms(pair[1]["least_margin_us"]),
    })  # fmt: skip


def _table(corner: str, columns: Sequence[Findings], lines: Lines) -> Table:
    rows = [[name, *map(value, columns)] for name, value in lines.items()]
    return Table([corner, *map(profiler, columns)], rows)


def _matches(found: Findings) -> str:
    if not found["compared_with_summary"]:
        return "not compared"
    return "yes" if not found["mismatches"] else f"mismatches: {len(found['mismatches'])}"


def _a_step(found: Findings, name: str) -> float:
    return fmean(step[name] for step in found["steps"])


def _rest_ms(found: Findings) -> float:
    busy_ms = _a_step(found, "compute_busy_ms") + _a_step(found, "stalled_ms")
    return max(0.0, _a_step(found, "duration_ms") - busy_ms)


def _peak_gib(found: Findings) -> str:
    peak = max((step["peak_memory_bytes"] or 0 for step in found["steps"]), default=0)
    return cell_gib(peak / GIB if peak else None)

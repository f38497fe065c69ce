"""Tables of the report that are made from result rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.flags import is_ours, recomputed_sites, swapped_layers, swapped_modules
from benchmarks.report.compare import PEAK, RESERVED, Duel, Faster, by_peak, gib, on_frontier
from benchmarks.report.overhead import CaseCost, Rung
from benchmarks.report.selection import VERIFIED
from benchmarks.report.text import ABSENT, Table, cell_gib, cell_number, cell_ratio, cell_share, cell_spread
from benchmarks.rows import COMPLETE, GIB, PEAKS, Row, outcome, peak_gib
from benchmarks.suites import losses
from benchmarks.suites.table import OTHER

PLAIN = "none"
"""The method that runs Megatron alone."""
COMPARED = ("losses_equal", "grad_norms_equal", "weights_sha256_equal")


def name(row: Row) -> str:
    """Return the method's name; ours in bold."""
    return f"**{row['method']}**" if is_ours(row) else str(row["method"])


def chosen(row: Row) -> str:
    """Return the swapped layers, the swapped modules if not all, and the recomputed sites, as Markdown."""
    modules, sites = swapped_modules(row), recomputed_sites(row)
    only = f", only `{modules}`" if modules else ""
    return f"`{swapped_layers(row)}`{only}" + (f", with `--swap-recompute {sites}`" if sites else "")


def methods_table(rows: Sequence[Row]) -> Table:
    """Build the table of all methods of one case by peak; a star marks those on the frontier."""
    none_ms = next((row["step_ms_median"] for row in rows if row["method"] == "none"), None)
    noise = losses.loss_noise(rows)
    stars = on_frontier(rows)
    other = OTHER[(rows[0].get("peak") or "allocated") if rows else "allocated"]
    head = ["method", "step ms (least–most)", "× none", "peak GiB", "− static", f"{other} GiB", "host GiB", "tokens/s",
            "losses"]  # fmt: skip
    lines = []
    for row in by_peak(rows):
        title = f"{name(row)} ★" if row in stars else name(row)
        if row["step_ms_median"] is None:
            lines.append([title, outcome(row), *[ABSENT] * (len(head) - 2)])
            continue
        peak, static = peak_gib(row), row["device_static_gib"]
        spread = cell_spread(row) if row["outcome"] == "ok" else f"{cell_spread(row)}, then {outcome(row)}"
        lines.append([
            title,
            spread,
            cell_ratio(row["step_ms_median"] / none_ms if none_ms else None),
            cell_gib(peak),
            cell_gib(None if peak is None or static is None else peak - static),
            cell_gib(row[PEAKS[other]]),
            cell_gib(row["host_peak_gib"]),
            cell_number(row["tokens_per_s"]),
            losses.cell(row, noise) or ABSENT,
        ])  # fmt: skip
    return Table(head, lines)


def duels_table(duels: Sequence[Duel], memory: str = PEAK) -> Table:
    """Build the table of our points and the best baseline with no more memory. ``memory``: the field compared."""
    what = {PEAK: "peak", RESERVED: "reserved"}[memory]
    head = [
        "our point", f"{what} GiB", "step ms", "best baseline", f"its {what} GiB", "its step ms", "faster",
    ]  # fmt: skip
    lines = []
    for duel in duels:
        mine = [name(duel.ours), cell_gib(gib(duel.ours, memory)), f"{duel.ours['step_ms_median']:.1f}"]
        if duel.baseline is None or duel.ratio is None:
            lines.append([*mine, "no baseline fits", ABSENT, ABSENT, ABSENT])
            continue
        words = {
            Faster.OURS: f"ours, {duel.ratio:.2f}×",
            Faster.BASELINE: f"the baseline, {duel.ratio:.2f}×",
            Faster.NEITHER: "no clear difference",
        }
        theirs = [name(duel.baseline), cell_gib(gib(duel.baseline, memory)), f"{duel.baseline['step_ms_median']:.1f}"]
        assert duel.faster is not None
        lines.append([*mine, *theirs, words[duel.faster]])
    return Table(head, lines)


def ladder_table(steps: Sequence[Rung]) -> Table:
    """Build the table of the swapped runs of one case, from the fewest bytes to the most."""
    head = ["run", "swapped layers", "compared with", "× its step", "out GiB", "peak GiB", "peak fell by", "late"]
    lines = [
        [
            name(step.row),
            chosen(step.row),
            str(step.unswapped["method"]),
            cell_ratio(step.ratio),
            cell_gib(step.out_gib),
            cell_gib(peak_gib(step.row)),
            cell_gib(step.fell_gib),
            cell_number(step.row.get("num_late")),
        ]
        for step in steps
    ]
    return Table(head, lines)


def cost_table(costs: Sequence[CaseCost]) -> Table:
    """Build the table of shapes by width, then by sequence length."""
    head = [
        "shape", "hidden size", "sequence", "micro-batch", "all layers: out GiB", "forward hides of it",
        "× with all swapped", "most layers for free", "peak falls by",
    ]  # fmt: skip
    ordered = sorted(costs, key=lambda cost: (cost.shape.hidden_size, cost.shape.sequence, cost.suite))
    lines = []
    for cost in ordered:
        every, free = cost.everything, cost.free
        lines.append([
            f"{cost.case} ({cost.suite})",
            str(cost.shape.hidden_size),
            str(cost.shape.sequence),
            str(cost.shape.micro_batch),
            cell_gib(every.out_gib if every else None),
            cell_share(every.predicted_out if every else None),
            cell_ratio(every.ratio if every else None),
            chosen(free.row) if free else "none of those run",
            cell_gib(free.fell_gib if free else None),
        ])  # fmt: skip
    return Table(head, lines)


def prediction_table(steps: Sequence[Rung]) -> Table:
    """Build the table of the predicted and measured hidden fraction of swapped runs."""
    head = ["run", "copies out, ms", "forward, ms", "copies in, ms", "backward, ms", "predicted", "measured"]
    lines = [
        [
            name(step.row),
            *(f"{ms:.1f}" for ms in (step.out_ms, step.forward_ms, step.in_ms, step.backward_ms) if ms is not None),
            cell_share(step.predicted_hidden),
            cell_share(step.measured_hidden),
        ]
        for step in steps
        if step.predicted_hidden is not None
    ]
    return Table(head, lines)


@dataclass(frozen=True)
class EqualRun:
    """A run and how it relates to the reference: the first completed run of its case."""

    row: Row
    is_reference: bool
    is_compared: bool
    """Whether the reference ran before it, so that the run was compared with the reference bit for bit."""

    @property
    def is_ours(self) -> bool:
        return is_ours(self.row)

    @property
    def is_equal(self) -> bool:
        """Return whether losses, gradient norms and weights are equal, as far as they were compared."""
        return self.row["outcome"] in COMPLETE and all(self.row.get(field) is not False for field in COMPARED)


def equal_runs(rows: Sequence[Row]) -> list[EqualRun]:
    """Return each row with its place in the comparison; each command has references of its own."""
    seen: set[tuple[str, str]] = set()
    found = []
    for row in rows:
        case = row["command"], row["case"]
        found.append(EqualRun(row, case not in seen and row["outcome"] == "ok", case in seen))
        if row["outcome"] == "ok":
            seen.add(case)
    return found


def equal_to_plain(rows: Sequence[Row]) -> list[EqualRun]:
    """Return the runs of ours in ``rows`` of one suite that were compared bit for bit with a run without Megatron Swap.

    Rows of verify are compared with the first completed run of their case, rows of other suites with their
    ``reference``, under deterministic kernels.
    """
    found, is_plain = [], False
    for run in equal_runs(rows):
        if not run.row["suite"].startswith(VERIFIED):
            is_deterministic = "--swap-deterministic" in run.row["flags"].split()
            if run.is_ours and run.row["outcome"] == "ok" and is_deterministic and run.row["reference"] == PLAIN:
                found.append(run)
        elif run.is_reference:
            is_plain = not run.is_ours
        elif run.is_compared and run.is_ours and is_plain:
            found.append(run)
    return found


def equality_table(runs: Sequence[EqualRun]) -> Table:
    """Build the table of reference and compared runs, case by case."""
    head = ["case", "ranks", "steps", "flags", "out GiB a step", "losses", "gradient norms", "final weights"]
    lines = []
    for run in runs:
        row = run.row
        setting = f"--{row['method']}"
        extra = row["flags"].partition(setting)[2].split()
        verdicts = ["reference"] * len(COMPARED) if run.is_reference else [_equal(row, field) for field in COMPARED]
        lines.append([
            str(row["case"]),
            str(row.get("num_ranks") or 1),
            str(len(row.get("losses") or ()) or ABSENT),
            f"`{' '.join([setting, *extra])}`",
            cell_gib(row["swapped_out_bytes"] / GIB if row.get("swapped_out_bytes") else None),
            *verdicts,
        ])  # fmt: skip
    return Table(head, lines)


def _equal(row: Row, field: str) -> str:
    if row["outcome"] not in COMPLETE:
        return outcome(row)
    if row.get(field) is None:
        return ABSENT
    return "equal" if row[field] else "**differ**"


def sources_table(files: Sequence[tuple[str, Sequence[Row]]], folder: str) -> Table:
    """Build the table of result files: suite, runs, machine, commit."""
    head = ["file", "suite", "runs", "machine", "commit"]
    lines = []
    for file, rows in files:
        gpus = dict.fromkeys(f"{row['machine'].get('num_gpus', 1)} × {row['machine']['gpu']}" for row in rows)
        commits = dict.fromkeys(row["commit"][:7] or "unknown" for row in rows)
        suites = dict.fromkeys(row["suite"] for row in rows)
        suite, machine, commit = (", ".join(found) for found in (suites, gpus, commits))
        lines.append([f"[{file}]({folder}/{file})", suite, cell_number(len(rows)), machine, commit])
    return Table(head, lines)

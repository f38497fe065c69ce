"""The results of a suite as Markdown tables. Those of a machine without a GPU have no times."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import GIB, MIB, PEAKS, Row, outcome, peak_gib
from benchmarks.suites import losses
from benchmarks.suites.frontier import frontier

LEGEND = (
    "Step: median of all timed steps of all rounds. ×: step ÷ that of `none`. Allocated, reserved: peaks of PyTorch's "
    "allocator. Peak: the one of the two that counts here. − static: peak "
    "without weights, gradients and optimizer state. Host: growth of the process or pinned memory, whichever is "
    "larger. Losses: largest relative difference from the reference, round by round (the reference: from its own first "
    "round). *Other losses*: more than noise; the method is not compared. ★: no other method is faster with less "
    "memory."
)
SAVED_LEGEND = (
    "Held: the most bytes of saved tensors that autograd holds at once, parameters excepted. A tensor counts until its "
    "memory is freed, so an offloaded one does not. What backward recomputes counts too, except in a run with a "
    "budget, which counts as its planner does. Of `{reference}`: held ÷ that of "
    "`{reference}`. Offloaded: bytes that Megatron Swap copies out in a step. Losses: those of all steps beside the "
    "same steps of `{reference}`. Times are in the rows alone: without a GPU threads emulate the copies, and "
    "the times say nothing about a GPU. Not counted: the method's own hooks hide its tensors from the count."
)
SAVED_HEAD = ("method", "held MiB", "of `{reference}`", "budget MiB", "offloaded MiB", "losses", "remarks")
HEAD = (
    "method", "step ms (least–most)", "×", "first step s", "tokens/s", "TFLOP/s", "peak GiB", "− static",
    "", "host GiB", "budget GiB", "losses", "remarks",
)  # fmt: skip
OTHER = {"allocated": "reserved", "reserved": "allocated"}
"""The second peak that is shown, by the one that counts."""


def heading(title: str, row: Row, legend: str) -> list[str]:
    """Return the lines above a table: title, command, machine and versions of a row, and the legend."""
    machine = row["machine"]
    gpu = machine["gpu"] if machine["gpu"] != "none" else f"CPU, {machine['cores']} cores"
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if version)
    run = f"`{row['command']}` on {gpu}; {versions}; commit {row['commit'] or 'unknown'}."
    return [f"# {title}", "", run, "", legend, ""]


def markdown(rows: Sequence[Row]) -> str:
    """Return one section per case, with the rows in their order."""
    reference = next((row["reference"] for row in rows if row["reference"]), "none")
    section, legend = _section, LEGEND
    if counts_saved(rows):
        section, legend = _saved_section, SAVED_LEGEND.format(reference=reference)
    lines = heading(rows[0]["suite"], rows[0], legend)
    for case in dict.fromkeys(row["case"] for row in rows):
        lines += section([row for row in rows if row["case"] == case])
    return "\n".join(lines)


def counts_saved(rows: Sequence[Row]) -> bool:
    """Return whether the peaks of the rows are those of saved tensors, as on a machine without a GPU."""
    return rows[0].get("peak") == "saved"


def _saved_section(rows: list[Row]) -> list[str]:
    reference = str(rows[0]["reference"])
    base = next((peak_gib(row) for row in rows if row["method"] == reference), None)
    head = [name.format(reference=reference) for name in SAVED_HEAD]
    return [f"## {rows[0]['case']}", "", *_grid([head, *(_saved_cells(row, base) for row in rows)]), ""]


def _saved_cells(row: Row, base: float | None) -> list[str]:
    """``base``: what autograd holds in the reference, in GiB."""
    held, out_bytes, budget = peak_gib(row), row["swapped_out_bytes"], row["budget_gib"]
    worked = row["losses"] is not None
    return [
        f"**{row['method']}**" if row["is_ours"] else row["method"],
        ("not counted" if worked else "") if held is None else f"{held * GIB / MIB:.1f}",
        "" if held is None or not base else f"{held / base:.0%}",
        "" if budget is None else f"{budget * GIB / MIB:.1f}",
        "" if out_bytes is None else f"{out_bytes / MIB:.1f}",
        _saved_losses(row),
        outcome(row) if row["outcome"] != "ok" else "",
    ]  # fmt: skip


def _saved_losses(row: Row) -> str:
    if row["losses_equal"] is None:
        return ""
    if row["method"] == row["reference"]:
        return f"{len(row['losses'])} steps"
    return "equal to the bit" if row["losses_equal"] else f"**differ by {row['loss_max_rel_diff']:.1e}**"


def _grid(table: list[list[str]]) -> list[str]:
    """Return the lines of a table without its empty columns."""
    filled = [column for column in range(len(table[0])) if any(cells[column] for cells in table[1:])]
    table = [[cells[column] for column in filled] for cells in table]
    return [f"| {' | '.join(cells)} |" for cells in [table[0], ["---"] * len(filled), *table[1:]]]


def _section(rows: list[Row]) -> list[str]:
    none = next((row["step_ms_median"] for row in rows if row["method"] == "none"), None)
    stars = frontier_methods(rows)
    noise = losses.loss_noise(rows)
    num_rounds = max(row["num_rounds"] for row in rows)
    lines = [f"## {rows[0]['case']}", "", f"Rounds: {num_rounds}. Reference of the losses: {rows[0]['reference']}.", ""]
    other = OTHER[rows[0].get("peak") or "allocated"]
    head = [name or f"{other} GiB" for name in HEAD]
    table = [head, *(_cells(row, none, noise, row["method"] in stars) for row in rows)]
    return [*lines, *_grid(table), ""]


def _cells(row: Row, none_ms: float | None, noise: float | None, is_star: bool) -> list[str]:
    name = f"**{row['method']}**" if row["is_ours"] else row["method"]
    if row["step_ms_median"] is None:
        return [name, outcome(row), *[""] * (len(HEAD) - 2)]
    peak, static = peak_gib(row), row["device_static_gib"]
    other = row[PEAKS[OTHER[row.get("peak") or "allocated"]]]
    remarks = (["★"] if is_star else []) + ([outcome(row)] if row["outcome"] != "ok" else [])
    return [
        name,
        f"{row['step_ms_median']:.1f} ({row['step_ms_min']:.1f}–{row['step_ms_max']:.1f})",
        f"{row['step_ms_median'] / none_ms:.3f}" if none_ms else "",
        f"{row['first_step_ms'] / 1e3:.1f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['model_tflops_per_s']:.1f}",
        *("" if value is None else f"{value:.2f}" for value in (
            peak, None if peak is None or static is None else peak - static, other, row["host_peak_gib"],
            row["budget_gib"],
        )),
        losses.cell(row, noise) or "",
        " ".join(remarks),
    ]  # fmt: skip


def frontier_methods(rows: Sequence[Row]) -> set[str]:
    """Return the methods of one case on the frontier of step time and peak memory; empty without measured peaks."""
    good = [row for row in losses.comparable(rows) if row["outcome"] == "ok" and peak_gib(row) is not None]
    chosen = frontier([(peak_gib(row) or 0.0, row["step_ms_median"]) for row in good])
    return {good[index]["method"] for index in chosen}

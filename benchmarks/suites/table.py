"""The results of a suite as Markdown tables. Those of a machine without a GPU have no times."""

from collections.abc import Sequence

from benchmarks.flags import is_ours
from benchmarks.rows import GIB, MIB, PEAKS, Row, by_case, outcome, peak_gib
from benchmarks.suites import losses
from benchmarks.suites.ranking import by_peak, on_frontier
from benchmarks.table import ABSENT, Table, cell_gib, cell_ms, cell_number, cell_ratio

LEGEND = (
    "Step: median of all timed steps of all rounds. × none: step ÷ that of `none`. Peak: the peak of PyTorch's "
    "allocator that counts here, allocated or reserved. − static: peak without weights, gradients and optimizer "
    "state. Host: growth of the process or pinned memory, whichever is larger. Losses: largest relative difference "
    "from the reference, round by round (the reference: from its own first round). *Other losses*: more than noise; "
    "the method is not compared. ★: no other method is faster with less memory."
)
SAVED_LEGEND = (
    "Held: the most bytes of saved tensors that autograd holds at once, parameters excepted. A tensor counts until its "
    "memory is freed, so an offloaded one does not. What backward recomputes counts too, except in a run with a "
    "budget, which counts as its planner does. Of `{reference}`: held ÷ that of "
    "`{reference}`. Offloaded: bytes that Megatron Swap copies out in a step. Losses: those of all steps beside the "
    "same steps of `{reference}`. Times are in the rows alone: without a GPU threads emulate the copies, and "
    "the times say nothing about a GPU. Not counted: the method's own hooks hide its tensors from the count."
)
OTHER = {"allocated": "reserved", "reserved": "allocated"}  # The second peak that is shown, by the one that counts


def heading(title: str, row: Row, legend: str) -> list[str]:
    machine = row["machine"]
    gpu = machine["gpu"] if machine["gpu"] != "none" else f"CPU, {machine['cores']} cores"
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if version)
    run = f"`{row['command']}` on {gpu}; {versions}; commit {row['commit'] or 'unknown'}."
    return [f"# {title}", "", run, "", legend, ""]


def markdown(rows: Sequence[Row]) -> str:
    saved = counts_saved(rows)
    reference = next((row["reference"] for row in rows if row["reference"]), "none")
    lines = heading(rows[0]["suite"], rows[0], SAVED_LEGEND.format(reference=reference) if saved else LEGEND)
    for case, mine in by_case(rows).items():
        num_rounds = max(row["num_rounds"] for row in mine)
        about = f"Rounds: {num_rounds}. Reference of the losses: {mine[0]['reference']}."
        lines += [f"## {case}", "", about, "", str((saved_table if saved else methods_table)(mine)), ""]
    return "\n".join(lines)


def counts_saved(rows: Sequence[Row]) -> bool:
    return rows[0].get("peak") == "saved"


def name(row: Row) -> str:
    return f"**{row['method']}**" if is_ours(row) else str(row["method"])


def spread(row: Row) -> str:
    times = row["step_ms_all"]
    text = f"{cell_ms(row['step_ms_median'])} ({min(times):.1f}–{max(times):.1f})"
    return text if row["outcome"] == "ok" else f"{text}, then {outcome(row)}"


def methods_table(rows: Sequence[Row]) -> Table:
    none_ms = next((row["step_ms_median"] for row in rows if row["method"] == "none"), None)
    noise, stars = losses.loss_noise(rows), on_frontier(rows)
    other = OTHER[(rows[0].get("peak") or "allocated") if rows else "allocated"]

    def beyond_static(row: Row) -> float | None:
        peak, static = peak_gib(row), row["device_static_gib"]
        return None if peak is None or static is None else peak - static

    columns = {
        "method": lambda row: f"{name(row)} ★" if row in stars else name(row),
        "step ms (least–most)": spread,
        "× none": lambda row: cell_ratio(row["step_ms_median"] / none_ms if none_ms else None),
        "peak GiB": lambda row: cell_gib(peak_gib(row)),
        "− static": lambda row: cell_gib(beyond_static(row)),
        f"{other} GiB": lambda row: cell_gib(row[PEAKS[other]]),
        "host GiB": lambda row: cell_gib(row["host_peak_gib"]),
        "tokens/s": lambda row: cell_number(row["tokens_per_s"]),
        "losses": lambda row: losses.cell(row, noise) or ABSENT,
    }
    lines = [
        [cell(row) for cell in columns.values()] if row["step_ms_median"] is not None
        else [name(row), outcome(row), *[ABSENT] * (len(columns) - 2)]
        for row in by_peak(rows)
    ]  # fmt: skip
    return Table([*columns], lines)


def saved_table(rows: Sequence[Row]) -> Table:
    reference = str(rows[0]["reference"])
    base = next((peak_gib(row) for row in rows if row["method"] == reference), None)

    def held(row: Row) -> str:
        is_hidden = peak_gib(row) is None and row["losses"] is not None
        return "not counted" if is_hidden else _mib(peak_gib(row))

    def share(row: Row) -> str:
        found = peak_gib(row)
        return "" if found is None or not base else f"{found / base:.0%}"

    def equal(row: Row) -> str:
        if row["losses_equal"] is None:
            return ""
        if row["method"] == row["reference"]:
            return f"{len(row['losses'])} steps"
        return "equal to the bit" if row["losses_equal"] else f"**differ by {row['loss_max_rel_diff']:.1e}**"

    return Table.of(rows, {
        "method": name,
        "held MiB": held,
        f"of `{reference}`": share,
        "budget MiB": lambda row: _mib(row["budget_gib"]),
        "offloaded MiB":
            lambda row: "" if row["swapped_out_bytes"] is None else cell_ms(row["swapped_out_bytes"] / MIB),
        "losses": equal,
        "remarks": lambda row: outcome(row) if row["outcome"] != "ok" else "",
    }).without_empty_columns()  # fmt: skip


def _mib(gib: float | None) -> str:
    return "" if gib is None else cell_ms(gib * GIB / MIB)

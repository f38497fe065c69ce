"""Draw the largest value of each method as bars and, for axes that grow the model, the machine's physical limit."""

from collections.abc import Sequence
from textwrap import fill

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from benchmarks import names
from benchmarks.flags import value
from benchmarks.pictures import BASELINES, LINE, OURS, TEXT, bars, new_figure
from benchmarks.rows import GIB, MIB, Row
from benchmarks.sweeps.axes import AXES
from benchmarks.sweeps.table import LargestValue, is_on_cpu, largest_by_method, machine_limit, params_of, short

LETTERS = 46  # Letters of a line of a method's name
FAR = 6  # The physical limit is not drawn beyond this multiple of the longest bar: the bars would vanish


def draw(rows: Sequence[Row]) -> Figure:
    found, axis = largest_by_method(rows), AXES[rows[0]["axis"]]
    # On a CPU a machine's memory is no limit of the sweep, and its models have few parameters.
    grows = axis.grows and not is_on_cpu(rows)
    lengths = [_length(one, grows) for one in found]
    limit = machine_limit(rows) if grows else None
    end, below = max(lengths) or 1.0, axis.unit
    figure = new_figure(13.0, 1.9 + 0.62 * len(found), 130)
    panel = figure.subplots()
    if limit is not None:
        billions = limit.params / 1e9
        is_near = billions <= FAR * max(lengths)
        what = "hatched: up to the physical limit" if is_near else "far to the right: the physical limit"
        below = f"parameters, billions\n{what}, {short(limit.params)} = ({limit.sum}) / {limit.param_bytes} bytes"
        if is_near:
            end = max(end, billions)
            panel.barh(
                range(len(found)), billions, height=0.62, color="none", edgecolor=LINE, hatch="////", lw=0.0, zorder=1
            )
            panel.axvline(billions, color=TEXT, lw=1.2, zorder=3)
    bars(panel, [fill(name, LETTERS) for name in _names(found, rows)], lengths, [one.is_ours for one in found])
    at = panel.get_yaxis_transform()
    for place, one in enumerate(found):
        after = one.stopped_short if one.stop is None else f"next, {one.stopped_short}"
        colour = OURS if one.is_ours else BASELINES
        panel.text(1.015, place - 0.06, _words(one), transform=at, va="bottom", color=colour, weight="bold")
        panel.text(1.015, place + 0.06, after, transform=at, va="top", fontsize=9, color=TEXT)
    panel.set_xlim(0, 1.01 * end)
    if not grows:
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.set_title(_title(rows[0]), loc="left", fontsize=14, fontweight="bold", color=TEXT)
    panel.set_xlabel(below, fontsize=10.5, loc="left")
    return figure


def _names(found: Sequence[LargestValue], rows: Sequence[Row]) -> list[str]:
    """Return the methods in words, of the largest run where there is one; those with equal words with their names."""
    shown = [one.best or one.stop or next(row for row in rows if row["method"] == one.method) for one in found]
    words = [names.method(row) for row in shown]
    pairs = zip(words, shown, strict=True)
    return [f"{word} ({row['method']})" if words.count(word) > 1 else word for word, row in pairs]


def _title(row: Row) -> str:
    gpu = str(row["machine"]["gpu"])
    where = "this machine" if gpu == "none" else f"one {gpu}"
    if is_on_cpu([row]) and (limit_gib := value(row, "--swap-cpu-memory-gib")) is not None:
        where = f"an emulated device of {float(limit_gib) * GIB / MIB:g} MiB"
    if row["axis"] != "depth":
        return f"The largest {row['axis']} that trains on {where}"
    shape = names.model({**row, "num_params": None, "params": None})
    return f"The largest GPT that trains on {where} (hidden size {value(row, '--hidden-size')}, {shape})"


def _length(found: LargestValue, grows: bool) -> float:
    if found.best is None:
        return 0.0
    return params_of(found.best) / 1e9 if grows else float(found.best["value"])


def _words(found: LargestValue) -> str:
    row = found.best
    if row is None:
        return "nothing that was tried trains"
    parts = [row["case"], short(params_of(row)) if AXES[row["axis"]].grows else None]
    parts.append(None if is_on_cpu([row]) else f"{row['tokens_per_s']:,.0f} tokens/s")
    parts.append(None if row["mfu"] is None else f"MFU {row['mfu']:.0%}")
    return " · ".join(part for part in parts if part)

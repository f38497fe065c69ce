"""Soaks: what processes hold after thousands of steps on a CPU, and after twenty minutes on a GPU."""

import json
import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.pictures import COLOURS, Picture, new_figure, tidy
from benchmarks.soak.meters import grown
from benchmarks.table import Table

FILES = {"cpu": "cpu-soak", "gpu": "h200-soak"}
"""Device -> the name of its result file and picture, without their endings."""
METRICS = {
    "device_bytes": ("device MiB", 2**20), "reserved_bytes": ("allocator MiB", 2**20),
    "pinned_bytes": ("host MiB", 2**20), "resident_bytes": ("resident MiB", 2**20), "num_files": ("files", 1),
    "num_threads": ("threads", 1), "num_objects": ("Python objects", 1),
}  # fmt: skip
"""Metric -> its name and unit."""


def read_soaks(results: Path) -> dict[str, dict[str, Any]]:
    paths = {device: results / f"{name}.json" for device, name in FILES.items()}
    return {device: json.loads(path.read_text()) for device, path in paths.items() if path.exists()}


def minutes(soak: dict[str, Any]) -> int:
    return int(soak["rows"][0]["seconds"] // 60)


def _metrics(rows: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    return {metric: shown for metric, shown in METRICS.items() if all(metric in row["curves"] for row in rows)}


def table(soak: dict[str, Any]) -> Table:
    """Build the table: medians of the middle third and of the last, at the phase where they differ most."""

    def change(row: dict[str, Any], metric: str, unit: int) -> str:
        found = next(change for change in row["changes"] if change["metric"] == metric)
        form = ",.1f" if unit > 1 else ",.0f"
        return f"{format(found['middle'] / unit, form)} → {format(found['last'] / unit, form)}"

    return Table.of(soak["rows"], {
        "case": lambda row: row["case"],
        "steps": lambda row: f"{row['num_steps']:,}",
        "rescues": lambda row: f"{row['num_rescues']:,}" if "num_rescues" in row else None,
        "losses equal": lambda row: "yes" if row["losses_equal"] else "**no**",
        "flat": lambda row: "**no**" if grown(row) else "yes",
        **{
            name: lambda row, metric=metric, unit=unit: change(row, metric, unit)  # type: ignore[misc]
            for metric, (name, unit) in _metrics(soak["rows"]).items()
        },
    })  # fmt: skip


def picture(folder: Path, device: str, soak: dict[str, Any]) -> Picture:
    shown = [{"case": row["case"], "curves": row["curves"]} for row in soak["rows"]]
    return Picture(folder / f"{FILES[device]}.png", shown, lambda: _draw(shown))


def _draw(rows: list[dict[str, Any]]) -> Figure:
    metrics = _metrics(rows)
    columns = math.ceil(len(metrics) / 2)
    figure = new_figure(4 * columns, 6.2, 120)
    panels = figure.subplots(2, columns).flat
    for panel, (metric, (name, unit)) in zip(panels, metrics.items(), strict=False):
        for index, row in enumerate(rows):
            steps, values = zip(*row["curves"][metric], strict=True)
            style = {"color": COLOURS[index % len(COLOURS)], "ls": "-" if index < len(COLOURS) else "--", "lw": 1.2}
            panel.plot(steps, [(value - values[0]) / unit for value in values], label=row["case"], **style)
        panel.set_title(name, loc="left", fontsize=10)
        panel.set_xlabel("step", fontsize=9)
        tidy(panel)
    for panel in figure.axes[len(metrics) :]:
        panel.set_axis_off()
    first_step = min(row["curves"][metric][0][0] for row in rows for metric in metrics)
    figure.suptitle(f"Change since step {first_step} or so", x=0.01, ha="left", fontsize=12, weight="bold")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure

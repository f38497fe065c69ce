"""Soaks: what processes hold after thousands of steps on a CPU, and after twenty minutes on a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.report.pictures import COLOURS, Picture
from benchmarks.report.text import ABSENT, Table
from benchmarks.soak.meters import grown

FILES = {"cpu": "cpu-soak", "gpu": "h200-soak"}
"""Device -> the name of its result file and picture, without their endings."""
METRICS = {
    "device_bytes": ("device MiB", 2**20), "reserved_bytes": ("allocator MiB", 2**20),
    "pinned_bytes": ("host MiB", 2**20), "resident_bytes": ("resident MiB", 2**20), "num_files": ("files", 1),
    "num_threads": ("threads", 1), "num_objects": ("Python objects", 1),
}  # fmt: skip
"""Metric -> its name and unit."""


def read_soaks(results: Path) -> dict[str, dict[str, Any]]:
    """Return the soaks' result files by their devices."""
    paths = {device: results / f"{name}.json" for device, name in FILES.items()}
    return {device: json.loads(path.read_text()) for device, path in paths.items() if path.exists()}


def minutes(soak: dict[str, Any]) -> int:
    """Return the whole minutes of a soak's first case, from its start to its end."""
    return int(soak["rows"][0]["seconds"] // 60)


def _metrics(rows: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """Return the metrics that all ``rows`` have."""
    return {metric: shown for metric, shown in METRICS.items() if all(metric in row["curves"] for row in rows)}


def table(soak: dict[str, Any]) -> Table:
    """Build the table: medians of the middle third and of the last, at the phase where they differ most."""
    metrics = _metrics(soak["rows"])
    head = ["case", "steps", "rescues", "losses equal", "flat", *(name for name, _ in metrics.values())]
    lines = []
    for row in soak["rows"]:
        changes = {change["metric"]: change for change in row["changes"]}
        lines.append([
            row["case"], f"{row['num_steps']:,}",
            f"{row['num_rescues']:,}" if "num_rescues" in row else ABSENT, "yes" if row["losses_equal"] else "**no**",
            "**no**" if grown(row) else "yes",
            *(
                f"{changes[metric]['middle'] / unit:,.1f} → {changes[metric]['last'] / unit:,.1f}"
                if unit > 1 else f"{changes[metric]['middle']:,.0f} → {changes[metric]['last']:,.0f}"
                for metric, (_, unit) in metrics.items()
            ),
        ])  # fmt: skip
    return Table(head, lines)


def picture(folder: Path, device: str, soak: dict[str, Any]) -> Picture:
    """Return the picture: each metric over the steps, as a change from its first point."""
    shown = [{"case": row["case"], "curves": row["curves"]} for row in soak["rows"]]
    return Picture(folder / f"{FILES[device]}.png", shown, lambda target: _draw(shown, target))


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    metrics = _metrics(rows)
    columns = math.ceil(len(metrics) / 2)
    figure, panels = plt.subplots(2, columns, figsize=(4 * columns, 6.2), dpi=120, layout="constrained")
    for panel in panels.flat[len(metrics) :]:
        panel.set_axis_off()
    for panel, (metric, (name, unit)) in zip(panels.flat, metrics.items(), strict=False):
        for index, row in enumerate(rows):
            points = row["curves"][metric]
            first = points[0][1]
            values = [(value - first) / unit for _, value in points]
            panel.plot([step for step, _ in points], values, color=COLOURS[index % len(COLOURS)], lw=1.2,
                       ls="-" if index < len(COLOURS) else "--", label=row["case"])  # fmt: skip
        panel.set_title(name, loc="left", fontsize=10)
        panel.set_xlabel("step", fontsize=9)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    first_step = min(row["curves"][metric][0][0] for row in rows for metric in metrics)
    figure.suptitle(f"Change since step {first_step} or so", x=0.01, ha="left", fontsize=12, weight="bold")
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path)
    plt.close(figure)

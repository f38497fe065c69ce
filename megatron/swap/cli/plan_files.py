"""Files of megatron-swap plan besides plans and profiles: a run's summary, and the picture of all budgets."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.swap.common.plan import Model
from megatron.swap.common.records import from_json, read_text
from megatron.swap.common.types import MemoryRow, UsageError
from megatron.swap.forecast.options import Option
from megatron.swap.planner.profile import Profile
from megatron.swap.planner.solve import Solution


def read_measured(path: Path, model: Model, pipeline_rank: int) -> tuple[MemoryRow, ...]:
    """Return the memory of the planned stage's first rank from a run's summary."""
    try:
        summary = json.loads(read_text(path))
        num_layers, ranks = summary["num_layers"], summary["ranks"]
        rank = ranks[pipeline_rank * len(ranks) // model.pipeline_parallel]
        rows = rank["memory"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UsageError(
            f"--summary {path}: is not what --swap-summary writes today ({type(error).__name__}: {error}). Train again "
            "with it, or leave --summary out."
        ) from error
    if num_layers != model.num_layers:
        raise UsageError(
            f"--summary {path}: is of {num_layers} layers, the training flags say {model.num_layers}. Give the "
            "flags of that run."
        )
    return from_json(tuple[MemoryRow, ...], rows, f"--summary {path}: memory")


def check_picture(path: Path) -> None:
    """Raise ``UsageError`` if matplotlib is missing, or draws no image file of that name."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise UsageError(
            f"--curve {path}: matplotlib is missing. Install it (pip install matplotlib), or leave --curve out."
        ) from error
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise UsageError(f"--curve {path}: must be a picture; its name ends in .{', .'.join(kinds)}.")


def draw(points: list[Solution], unswapped: Option, profile: Profile, path: Path) -> None:
    """Draw step time, relative to nothing swapped, against device memory in GiB."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=130, layout="constrained")
    assert unswapped.prediction is not None
    unswapped_ms = unswapped.prediction.step_ms
    budgets = [point.plan.budget_gib or 0.0 for point in points]
    relative = [point.prediction.step_ms / unswapped_ms for point in points]
    bounds = [point.lower_bound_ms / unswapped_ms for point in points]
    axes.step(budgets, relative, where="post", color="#c2410c", label="fastest plan found")
    axes.plot(budgets, bounds, color="#94a3b8", linestyle="--", label="lower bound of all plans")
    axes.plot(unswapped.device_gib, 1.0, "o", color="#1e293b", label="nothing swapped")
    axes.axvline(profile.static_gib, color="#475569", linewidth=0.8)
    axes.annotate(
        "weights, gradients, optimizer", (profile.static_gib, 1.0), (6, 0), textcoords="offset points",
        color="#475569", rotation=90, va="bottom",
    )  # fmt: skip
    axes.set_xlabel("device memory (GiB)")
    axes.set_ylabel("step time relative to nothing swapped")
    axes.set_title(f"{profile.device.name}, {profile.model.num_layers} layers of {profile.model.hidden_size}, "
                   f"sequences of {profile.model.seq_length}")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)

"""Two lines behind the last iteration: the effect of swapping on memory, and the next command."""

import math
from collections.abc import Sequence

from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB, format_bytes
from megatron.swap.reporting.summary import RankReport


def verdict_lines(settings: Settings, ranks: Sequence[RankReport]) -> list[str]:
    """Return lines on the bytes that autograd held, and would hold without swapping, and on the next command."""
    counted = [(report.counted, number) for number, report in enumerate(ranks) if report.counted is not None]
    if not counted:
        return ["the run ended before a step under its plan was counted", f"next: {_next(settings, ranks)}"]
    figures, rank = max(counted, key=lambda entry: entry[0].saved_bytes)  # the rank that saves most
    whose = f" (rank {rank})" if len(ranks) > 1 else ""
    what = "without swapping"
    if settings.recompute or settings.plan is not None or settings.auto:
        what += " and recomputation"
    waits = [report.steps[-1].moved.wait_ms for report in ranks if report.steps]
    held = (
        f"autograd held at most {format_bytes(figures.held_bytes)}; {what} it would hold "
        f"{format_bytes(figures.saved_bytes)} (bytes saved in step {figures.iteration}{whose}, counted); compute "
        f"waited {max(waits):.1f} ms for copies in the last step"
    )
    return [held, f"next: {_next(settings, ranks)}"]


def _next(settings: Settings, ranks: Sequence[RankReport]) -> str:
    given = f"--swap-layers {settings.layers}"
    if settings.auto:
        given = "--swap-memory-gib" if settings.memory_gib is not None else "the memory budget"
    elif settings.plan is not None:
        given = f"--swap-plan {settings.plan.file}"
    elif not settings.swaps_layers:
        given = "the --swap- flags"
    reserved_bytes = [report.device_reserved_bytes for report in ranks if report.device_reserved_bytes is not None]
    if not reserved_bytes:
        return (
            f"the same command with --swap-layers none in place of {given} prints the same losses. This machine has "
            "no GPU, so its times say nothing of one: plan a run for a GPU with python -m megatron.swap.cli.main plan"
        )
    if settings.auto and settings.save_plan is None:
        return "--swap-save-plan FILE writes the plan; --swap-plan FILE then trains by it from the first step"
    if settings.auto:
        return f"--swap-plan {settings.save_plan} in place of {given} trains by this plan from the first step"
    budget_gib = math.ceil(max(reserved_bytes) / GIB)
    return f"--swap-memory-gib {budget_gib} in place of {given}: the fastest plan within the memory of this run"

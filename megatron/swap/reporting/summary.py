"""Output of a run: the table at the start, a line for each iteration, the table and the JSON file at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.swap.common.counters import Totals
from megatron.swap.common.layer_ranges import format_ranges
from megatron.swap.common.records import write_text
from megatron.swap.common.settings import Settings, parse_layers
from megatron.swap.common.types import GIB, MemoryRow, Site, format_bytes, layer_positions
from megatron.swap.engine.oom_guard import Rescue

MANY_FRAGMENTS = 0.02  # memory held beyond the peak in use, as a fraction of it, above which a hint is printed
FEW_FULL_STEPS = 2
"""Steps with a full device that need no hint: first uses and trials of plans may fill it for a moment."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """An iteration of a rank, or the sum of several."""

    iteration: int
    moved: Totals
    loss: Any  # a number, or a tensor with one element; None on all pipeline stages but the last
    grad_norm: float | None
    num_rescues: int = 0  # failed allocations that succeeded after saved tensors were evicted
    rescued_bytes: int = 0  # evicted for them
    short_bytes: int = 0  # most bytes that the device was short of at once
    # Allocations for which PyTorch's allocator released its cache, which makes the host wait.
    num_alloc_retries: int = 0
    # Of a sum: iterations in which the allocator did that; None: a single iteration.
    num_full_of_several: int | None = None

    @property
    def num_full(self) -> int:
        """Number of iterations in which the allocator released its whole cache."""
        return int(self.num_alloc_retries > 0) if self.num_full_of_several is None else self.num_full_of_several

    def plus(self, later: StepRecord) -> StepRecord:
        """Return the sum of this and a later iteration: it has neither loss nor gradient norm."""
        return StepRecord(
            iteration=later.iteration, moved=self.moved.plus(later.moved), loss=None, grad_norm=None,
            num_rescues=self.num_rescues + later.num_rescues, rescued_bytes=self.rescued_bytes + later.rescued_bytes,
            short_bytes=max(self.short_bytes, later.short_bytes),
            num_alloc_retries=self.num_alloc_retries + later.num_alloc_retries,
            num_full_of_several=self.num_full + later.num_full,
        )  # fmt: skip


@dataclass(frozen=True)
class CountedStep:
    """A step in which the bytes that autograd holds were counted, without saves of layers that run again."""

    iteration: int
    held_bytes: int  # held by autograd
    saved_bytes: int  # held if nothing were offloaded or recomputed site by site


@dataclass
class RankReport:
    """Figures of a rank at the end of a run. Names are keys of the summary file."""

    steps: list[StepRecord]  # all iterations if a summary is written; else the sum of all but the last, and the last
    device: str
    device_peak_bytes: int | None
    saved_peak_bytes: int | None
    host_booked_bytes: int
    host_leased_peak_bytes: int
    stayed_bytes: int
    device_reserved_bytes: int | None = None  # most bytes that the device's allocator held, in use or cached
    disk_booked_bytes: int = 0
    disk_leased_peak_bytes: int = 0
    optimizer_host_bytes: int = 0  # for optimizer state, not counted in ``host_booked_bytes``
    optimizer_disk_bytes: int = 0  # for optimizer state, not counted in ``disk_booked_bytes``
    optimizer_out_bytes: int = 0
    optimizer_in_bytes: int = 0  # copied in the whole run, as ``optimizer_out_bytes``
    swapped_layers: list[int] = field(default_factory=list)
    recompute_refused: list[str] = field(default_factory=list)  # ``site: reason``, against the policy
    counted: CountedStep | None = None  # last step that was counted under the run's last plan
    memory: list[MemoryRow] | None = None  # the memory report; None if no summary was asked for


def step_line(step: StepRecord, device_peak_bytes: int | None) -> str:
    """Return the line for an iteration, printed beside Megatron's."""
    recomputed = f" | recomputed {format_bytes(step.moved.recomputed_bytes)}" if step.moved.recomputed_bytes else ""
    peak = f" | device peak {format_bytes(device_peak_bytes)}" if device_peak_bytes is not None else ""
    return (
        f"out {format_bytes(step.moved.out_bytes)} | in {format_bytes(step.moved.in_bytes)} | "
        f"compute waited {step.moved.wait_ms:.1f} ms{recomputed}{peak}"
    )


def scalars(step: StepRecord, device_peak_bytes: int | None) -> dict[str, float]:
    """Return the figures of ``step_line`` as scalars for TensorBoard."""
    found = {
        "swap/out-gib": step.moved.out_bytes / GIB, "swap/in-gib": step.moved.in_bytes / GIB,
        "swap/wait-ms": step.moved.wait_ms, "swap/rescues": step.num_rescues,
    }  # fmt: skip
    return found if device_peak_bytes is None else found | {"swap/device-peak-gib": device_peak_bytes / GIB}


def refused_lines(refused: Iterable[tuple[Site, str]]) -> list[str]:
    """Return a line for each reason why sites are not recomputed."""
    sites: dict[str, list[Site]] = {}
    for site, reason in refused:
        sites.setdefault(reason, []).append(site)
    return [
        f"not recomputed: {same[0]}" + (f" and {len(same) - 1} more" if len(same) > 1 else "") + f": {reason}"
        for reason, same in sites.items()
    ]


def rescue_lines(rescues: Sequence[Rescue]) -> list[str]:
    """Return lines on the guard's rescues in an iteration: the first in full, the others in sum."""
    lines = [f"out-of-memory guard: {rescues[0]}"] if rescues else []
    if len(rescues) > 1:
        freed = format_bytes(sum(rescue.freed_bytes for rescue in rescues[1:]))
        ms = sum(rescue.ms for rescue in rescues[1:])
        lines.append(f"out-of-memory guard: {len(rescues) - 1} more in this iteration, {freed} in {ms:.1f} ms")
    return lines


def idle_line(kind: str) -> str:
    """Return the line on a kind of ``--swap-recompute`` that was never recomputed."""
    return f"--swap-recompute {kind} does nothing here: no saved tensor above --swap-min-mib comes from such a kernel"


def name_layers(layers: Iterable[int]) -> str:
    """Return ``[0, 1, 2, 5]`` as ``0-2, 5``."""
    return format_ranges(layers, separator=", ") or "none"


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """Return rows as a text table under a heading, aligned to the right."""
    cells = [list(head), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(" " + line for line in [lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def layer_table(summary: dict[str, Any], swaps: bool = True) -> str:
    """Return the table at the end: a row for each range of layers with equal figures, and the guard's work."""
    number = summary.get("num_rescues", 0)
    if not number:
        return _layer_table(summary) if swaps else " swap: the out-of-memory guard was not needed"
    # Where no layers were to be swapped, the guard alone may have evicted tensors.
    rescues = (
        f" swap: the out-of-memory guard rescued {number} allocations: the device was short of up to "
        f"{format_bytes(summary['short_bytes'])}; {format_bytes(summary['rescued_bytes'])} were evicted in total"
    )
    return f"{_layer_table(summary)}\n{rescues}" if swaps else rescues


def _layer_table(summary: dict[str, Any]) -> str:
    rows: list[tuple[list[int], tuple[int, int]]] = []
    for entry in summary["layers"]:
        figures = (entry["swapped_out_bytes"], entry["swapped_in_bytes"])
        if rows and rows[-1][1] == figures and rows[-1][0][-1] + 1 == entry["layer"]:
            rows[-1][0].append(entry["layer"])
        else:
            rows.append(([entry["layer"]], figures))
    shown = [
        (name_layers(layers), len(layers), _moved(out), _moved(back), _moved(out * len(layers)))
        for layers, (out, back) in rows
    ]
    if not any(out for _, (out, _) in rows):
        if summary.get("planning") is not None:
            return " swap: the last step swapped nothing: its plan keeps or recomputes everything"
        return (
            " swap: nothing was swapped: each saved tensor is smaller than --swap-min-mib, or of no module that was "
            "chosen, or of one of the last layers, which are kept"
        )
    return table(shown, ("layers", "number", "out a step, each", "in a step, each", "out a step, together"))


def memory_lines(rows: Sequence[MemoryRow]) -> list[str]:
    """Return the memory report as lines, for a run that went out of memory."""
    tiers = [(row.kind, (row.device_bytes, row.host_bytes, row.disk_bytes)) for row in rows]
    shown = [(kind, *map(format_bytes, num_bytes)) for kind, num_bytes in tiers if any(num_bytes)]
    return ["out of memory; peak memory by kind:", *table(shown, ("memory", "device", "host", "disk")).splitlines()]


def device_line(summary: dict[str, Any], expands: bool) -> str | None:
    """Return the line on device memory, held and in use, or None without a GPU."""
    peak_bytes, reserved_bytes = summary["device_peak_bytes"], summary["device_reserved_bytes"]
    if peak_bytes is None or reserved_bytes is None:
        return None
    line = f" swap: the device held at most {format_bytes(reserved_bytes)}, {format_bytes(peak_bytes)} of it in use"
    # Segments that grow (``expands``) leave few fragments.
    if reserved_bytes - peak_bytes > MANY_FRAGMENTS * peak_bytes and not expands:
        line += "; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves fewer fragments"
    num_full = summary["num_full_steps"]
    if num_full > FEW_FULL_STEPS:
        line += f"; in {num_full} steps it was full, and training waited while the allocator released its cache"
    return line


def _moved(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "stays"


def build_summary(
    num_layers: int, ranks: Sequence[RankReport], planning: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON summary of a run. Bytes are sums over ranks; peaks and waits are those of the worst rank.

    Counts of a step (``swapped_out_bytes``, ``num_recomputed``, ``wait_ms``, ``layers`` …) are those of the last step.
    ``steps`` are those of rank 0. All other figures span the run.
    """
    steps = [rank.steps[-1] for rank in ranks if rank.steps]
    layers: dict[int, list[int]] = {layer: [0, 0] for layer in range(num_layers)}
    for step in steps:
        for layer, (out_bytes, in_bytes) in step.moved.layers.items():
            layers[layer][0] += out_bytes
            layers[layer][1] += in_bytes
    all_steps = [step for rank in ranks for step in rank.steps]
    with_loss = next((rank.steps for rank in ranks if rank.steps and rank.steps[-1].loss is not None), [])
    return {
        "num_layers": num_layers,
        "num_ranks": len(ranks),
        "device": ranks[0].device,
        "swapped_layers": sorted({layer for rank in ranks for layer in rank.swapped_layers}),
        "swapped_out_bytes": sum(step.moved.out_bytes for step in steps),
        "swapped_in_bytes": sum(step.moved.in_bytes for step in steps),
        "num_groups": sum(step.moved.num_groups for step in steps),
        "wait_ms": max((step.moved.wait_ms for step in steps), default=0.0),
        "host_booked_bytes": sum(rank.host_booked_bytes for rank in ranks),
        "host_leased_peak_bytes": sum(rank.host_leased_peak_bytes for rank in ranks),
        "disk_booked_bytes": sum(rank.disk_booked_bytes for rank in ranks),
        "disk_leased_peak_bytes": sum(rank.disk_leased_peak_bytes for rank in ranks),
        "optimizer_host_bytes": sum(rank.optimizer_host_bytes for rank in ranks),
        "optimizer_disk_bytes": sum(rank.optimizer_disk_bytes for rank in ranks),
        "optimizer_out_bytes": sum(rank.optimizer_out_bytes for rank in ranks),
        "optimizer_in_bytes": sum(rank.optimizer_in_bytes for rank in ranks),
        "device_peak_bytes": _largest(rank.device_peak_bytes for rank in ranks),
        "device_reserved_bytes": _largest(rank.device_reserved_bytes for rank in ranks),
        "saved_peak_bytes": _largest(rank.saved_peak_bytes for rank in ranks),
        "num_late": sum(step.moved.num_late for step in steps),
        "recomputed_bytes": sum(step.moved.recomputed_bytes for step in steps),
        "num_recomputed": sum(step.moved.num_recomputed for step in steps),
        "recompute_refused": sorted({line for rank in ranks for line in rank.recompute_refused}),
        "stayed_bytes": sum(rank.stayed_bytes for rank in ranks),
        "num_rescues": sum(step.num_rescues for step in all_steps),
        "rescued_bytes": sum(step.rescued_bytes for step in all_steps),
        "short_bytes": max((step.short_bytes for step in all_steps), default=0),
        "num_alloc_retries": sum(step.num_alloc_retries for step in all_steps),
        "num_full_steps": max((sum(step.num_full for step in rank.steps) for rank in ranks), default=0),
        "layers": [
            {"layer": layer, "swapped_out_bytes": out_bytes, "swapped_in_bytes": in_bytes}
            for layer, (out_bytes, in_bytes) in layers.items()
        ],
        "steps": [
            {"iteration": step.iteration, "swapped_out_bytes": step.moved.out_bytes,
             "swapped_in_bytes": step.moved.in_bytes, "num_out_copies": step.moved.num_out_copies,
             "num_in_copies": step.moved.num_in_copies, "num_late": step.moved.num_late, "wait_ms": step.moved.wait_ms,
             "recomputed_bytes": step.moved.recomputed_bytes, "num_recomputed": step.moved.num_recomputed,
             "num_rescues": step.num_rescues, "rescued_bytes": step.rescued_bytes, "short_bytes": step.short_bytes,
             "num_alloc_retries": step.num_alloc_retries}
            for step in (ranks[0].steps if ranks else [])
        ],
        "losses": [step.loss.hex() for step in with_loss if step.loss is not None],
        "grad_norms": [step.grad_norm.hex() for step in with_loss if step.grad_norm is not None],
        "planning": planning,
        "ranks": [{k: v for k, v in asdict(rank).items() if k != "steps"} for rank in ranks],
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def start_table(
    settings: Settings, num_layers: int, reserved_bytes: int, limit_bytes: int, guard_bytes: int = 0,
    needs: str | None = None,
) -> list[str]:  # fmt: skip
    """Return the lines of the table before the first iteration. ``needs``: the memory that the run needs, if known."""
    plan = settings.plan
    host = ("host memory", f"{format_bytes(reserved_bytes)} reserved, at most {format_bytes(limit_bytes)} a rank")
    guard = ("guard", f"evicts saved tensors when an allocation fails; host memory for it: {format_bytes(guard_bytes)}")
    guards = [guard] if settings.oom_guard else []
    needed = [] if needs is None else [("memory", needs)]
    if settings.auto:
        return _rows([*needed, host, *guards])
    layers = parse_layers(settings.layers, num_layers)
    if plan is not None:
        layers = frozenset(filter(plan.swaps_layer, plan.layers()))
    # Of a single model chunk and a prefetch window of one layer.
    last = layer_positions([layer in layers for layer in range(num_layers)], ends_in_loss=True)[-1]
    tail = range(num_layers - last.num_trailing_kept(window_groups=1), num_layers)
    window_bytes = settings.window_bytes(plan)
    window = "as large as one layer" if window_bytes is None else format_bytes(window_bytes)
    modules = " ".join(settings.modules) or ("all modules" if plan is None else "the sites that the plan names")
    kept = name_layers(tail) if window_bytes is None else f"{num_layers - 1} and those that fit the prefetch window"
    rows = [
        ("chosen", f"layers {name_layers(layers)} of {num_layers}" + (f": {modules}" if layers else "")),
        ("kept", f"layers {kept}: backward needs them first" if tail else "none"),
        host,
        ("prefetch window", window),
    ]
    if not layers:
        rows = rows[:1]
    rows[:0] = needed
    if plan is not None:
        recomputed = [layer for layer in plan.layers() if plan.recomputes_layer(layer) or plan.sections(layer)]
        rows.append(("recomputed", f"layers {name_layers(recomputed)} of {num_layers}: {modules}"))
    rows += guards
    if settings.recompute:
        rows.append(("recomputed", f"{' and '.join(settings.recompute)} outputs of all layers"))
    return _rows(rows)


def _rows(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name:<16} {value}" for name, value in rows]


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)

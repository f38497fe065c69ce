"""The report of a rank at the end of a run, and the summary of all ranks that is written and printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.swap.common.log import logger
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import MemoryRow
from megatron.swap.devices.cuda import expands_segments
from megatron.swap.megatron_lm.optimizer_adapter import unchained
from megatron.swap.megatron_lm.optimizer_swap import OptimizerSwap
from megatron.swap.reporting import memory_report
from megatron.swap.reporting.summary import RankReport, StepRecord, build_summary, device_line, layer_table, write_json
from megatron.swap.reporting.verdict import verdict_lines
from megatron.swap.run.parts import Parts
from megatron.swap.run.run_device import RunDevice


def report_of(
    steps: Sequence[StepRecord], run_device: RunDevice, parts: Parts | None, optimizer: OptimizerSwap | None
) -> RankReport:
    """Return this rank's figures. Reads losses from the device, which must be idle or broken.

    ``parts`` is None if no saved tensor was touched, ``optimizer`` if no optimizer state was offloaded.
    """
    observer = run_device.observer
    report = RankReport(
        steps=[replace(step, loss=None if step.loss is None else float(step.loss)) for step in steps],
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        device_peak_bytes=run_device.device.peak_bytes(),  # torch's own peak is reset by a recorder
        saved_peak_bytes=None if observer is None else observer.peak_bytes,
        host_booked_bytes=0, host_leased_peak_bytes=0, stayed_bytes=0,
        device_reserved_bytes=run_device.device.peak_reserved_bytes(), counted=run_device.counted,
    )
    if optimizer is not None:
        optimizer.report_to(report)
    if parts is not None:
        stats, layers = parts.machine.tier.stats(), parts.manager.counters.layers
        report.host_booked_bytes = stats.reserved_bytes
        report.host_leased_peak_bytes = stats.leased_peak_bytes
        report.disk_booked_bytes = stats.disk_reserved_bytes
        report.disk_leased_peak_bytes = stats.disk_peak_bytes
        report.stayed_bytes = sum(layer.stayed_bytes for layer in layers.values())
        if parts.recomputer is not None:
            report.recompute_refused = [f"{site}: {reason}" for site, reason in parts.recomputer.refused.items()]
        report.swapped_layers = sorted(number for number, layer in layers.items() if layer.out_bytes)
    return report


def memory_of(
    report: RankReport,
    run_device: RunDevice,
    swap: OptimizerSwap | None,
    chunks: Sequence[nn.Module],
    optimizer: Any,
) -> list[MemoryRow]:
    """Return the memory in use on this rank, by kind and tier. ``optimizer`` is Megatron's, or None."""
    offloaded = swap.offloaded_tensors() if swap is not None else ()
    inner = [one.optimizer for one in unchained(optimizer)]
    return memory_report.measure(report, run_device.device, chunks, inner, offloaded)


def write_summary(
    path: str | None,
    num_layers: int,
    reports: Sequence[RankReport],
    planning: dict[str, Any] | None,
) -> dict[str, Any]:
    """Build the summary of all ranks, write it to ``path`` if that is given, and return it."""
    summary = build_summary(num_layers, list(reports), planning)
    if path is not None:
        try:
            write_json(path, summary)
        except OSError as error:  # must not prevent Megatron's last checkpoint, which is still to come
            logger.warning("--swap-summary was not written: %s", error)
    return summary


def lines_of(
    summary: dict[str, Any], settings: Settings, reports: Sequence[RankReport], *, swaps: bool
) -> list[str]:
    """Return the lines at the end: the table of layers, the device's allocator, the verdict if layers were swapped."""
    device = device_line(summary, expands_segments())
    verdict = [f" swap: {line}" for line in verdict_lines(settings, reports)] if swaps else []
    return [layer_table(summary, swaps), *([] if device is None else [device]), *verdict]

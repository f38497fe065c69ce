"""The report of a rank at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron.swap.megatron_lm.optimizer_swap import OptimizerSwap
from megatron.swap.reporting.summary import RankReport, StepRecord
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

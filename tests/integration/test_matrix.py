"""The rows of the matrix: losses, gradients, weights, optimizer state and random generators are equal to the bit."""

from pathlib import Path

import pytest

from megatron.swap.common.plan import load_plan, save_plan
from megatron.swap.common.types import GIB
from tests.integration.harness import SWAP_SMALL, Run, Trainer, assert_same_training, assert_swapped
from tests.integration.rows import (
    ANGLES_BYTES,
    HIDDEN_BYTES,
    MIXED,
    OFFLOADED_OF_MIXED,
    ROWS,
    SKIPS_STEPS,
    WHOLE,
    Row,
    plan_for,
)
from tests.unit.native.helpers import NEEDS_COMPILER

PEAK_WITHIN = 0.05
"""Tolerance of a predicted peak, downwards only. The emulation counts a prefetched storage from its first use."""


def marks(row: Row) -> list[pytest.MarkDecorator]:
    given = (pytest.mark.nightly, row.is_nightly), (pytest.mark.short, row.is_short), (NEEDS_COMPILER, row.lacks)
    return [mark for mark, is_given in given if is_given]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(row)) for name, row in ROWS.items()])
def test_equal_to_the_bit(trainer: Trainer, tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    plain = trainer.unswapped(row.training, ranks=row.ranks)
    run = trainer.live(f"{row.training} {SWAP_SMALL} {ours(row, plain, tmp_path)}", ranks=row.ranks)
    assert_same_training(plain, run)
    summary = run.summary
    found = {key: summary[key] for key in row.expected}
    assert found == dict(row.expected)
    assert summary["num_ranks"] == len(summary["ranks"]) == row.ranks
    assert row.lacks or summary["saved_peak_bytes"] <= row.peak * plain.summary["saved_peak_bytes"]
    assert summary["num_late"] == 0 or row.budget or row.lacks or "--swap-prefetch-gib" in row.swap
    if row.plan or "--swap-recompute" in row.swap:
        assert (summary["recomputed_bytes"] > 0) == (summary["num_recomputed"] > 0) == (row.plan != WHOLE)
        assert {line.split(": ", 1)[1] for line in summary["recompute_refused"]} <= {row.may_refuse}
    if row.swap.startswith("--swap-layers none --swap-recompute"):
        assert_spares(row, plain, run)
    elif row.lacks:
        assert_rescued(run)
    elif row.budget:
        assert_planned(row, plain, run)
    elif row.plan:
        assert_follows_plan(row, run)
    if row.offloads:
        assert_swapped(run)
    if row.offloaded is not None:
        assert summary["swapped_out_bytes"] == row.offloaded * row.hidden_bytes
    if row.offloads and row.expected.get("swapped_out_bytes") != 0:
        assert summary["swapped_in_bytes"] > 0, "the last step has not swapped"
        assert summary["num_groups"] > 0
        assert summary["saved_peak_bytes"] < plain.summary["saved_peak_bytes"]
    if "--pipeline" in row.training and (row.offloads or row.budget):
        assert len({tuple(rank["swapped_layers"]) for rank in summary["ranks"]}) > 1, "each stage has its own layers"
    if "--swap-optimizer" in row.swap and not row.budget:
        assert_offloads_state(row, run)


def ours(row: Row, plain: Run, folder: Path) -> str:
    flags, saved_gib = row.swap, plain.summary["saved_peak_bytes"] / GIB
    if not row.budget:  # a planner measures the link: it would recompute everything
        flags += " --swap-cpu-delay-ms 2"
    if row.budget:
        flags += f" --swap-memory-gib {row.budget * saved_gib}"
    if row.lacks:
        memory_gib = plain.summary["device_peak_bytes"] / GIB - row.lacks * saved_gib
        flags += f" --swap-oom-guard --swap-cpu-memory-gib {memory_gib}"
    if row.least_state:
        flags += " --swap-save-plan plan.json"
    if row.plan:
        save_plan(plan_for(row.training, *row.plan), folder / "plan.json")
        flags += f" --swap-plan {folder / 'plan.json'}"
    return flags


def assert_spares(row: Row, plain: Run, run: Run) -> None:
    """Check that the peak falls by what a micro-batch does not hold."""
    one_micro_batch = row.expected["recomputed_bytes"] / 2
    spared = plain.summary["saved_peak_bytes"] - run.summary["saved_peak_bytes"]
    if "rotary" in row.swap:
        spared += ANGLES_BYTES  # kept for all layers
    if "rotary" in row.swap and "linear" in row.swap:
        # Where so little is held, the peak is in backward, beside what is made again there.
        assert one_micro_batch - (2 if "residual" in row.swap else 1) * HIDDEN_BYTES <= spared <= one_micro_batch
    else:
        assert spared == one_micro_batch


def assert_rescued(run: Run) -> None:
    summary = run.summary
    assert summary["num_rescues"] > 0
    assert 0 < summary["short_bytes"] <= summary["rescued_bytes"]
    assert "out-of-memory guard: an allocation of" in run.output
    assert f"the out-of-memory guard rescued {summary['num_rescues']} allocations" in run.output


def assert_planned(row: Row, plain: Run, run: Run) -> None:
    """Check that the run planned itself once, to a peak below its budget, and keeps to its plan. Experts, whose sizes
    change, may hold less."""
    summary, planning = run.summary, run.summary["planning"]
    assert planning["budget_gib"] == pytest.approx(row.budget * plain.summary["saved_peak_bytes"] / GIB)
    assert [entry["stage"] for entry in planning["stages"]] == ["profile", "search", "stable"]
    assert planning["num_replans"] == 0
    predicted_gib, peak_gib = planning["predicted_peak_gib"], summary["saved_peak_bytes"] / GIB
    if "--swap-optimizer" not in row.swap:
        assert predicted_gib <= planning["budget_gib"]
        assert peak_gib <= predicted_gib * 1.0001
        assert peak_gib >= (1 - PEAK_WITHIN) * predicted_gib or "--num-experts" in row.flags
    # The last step of all ranks. A plan may offload the optimizer's state alone.
    assert summary["swapped_out_bytes"] + summary["recomputed_bytes"] + summary["optimizer_host_bytes"] > 0
    if row.least_state:
        fraction = load_plan(run.directory / "plan.json").offload_fraction
        assert fraction is not None
        assert row.least_state <= fraction <= 1
        assert "optimizer state of" in run.output


def assert_follows_plan(row: Row, run: Run) -> None:
    """Check that every site of the plan was found, and that sites which it does not name are told."""
    assert "planned, but nothing was saved there" not in run.output
    if row.plan == WHOLE:
        assert run.summary["swapped_out_bytes"] == 0
        assert "--swap-plan: " not in run.output
    if row.plan == MIXED:
        assert run.summary["swapped_layers"] == OFFLOADED_OF_MIXED
        assert "saved, but not in the plan, so kept: " in run.output


def assert_offloads_state(row: Row, run: Run) -> None:
    """Check that each step offloads all of it, and each step but the first, which creates it, loads all of it.

    What is loaded ahead of a skipped step is loaded for nothing.
    """
    assert all(rank["optimizer_host_bytes"] + rank["optimizer_disk_bytes"] > 0 for rank in run.summary["ranks"])
    assert (run.summary["optimizer_disk_bytes"] > 0) == ("--swap-disk-dir" in row.swap)
    assert "optimizer state of" in run.output
    assert ("on disk: " in run.output) == ("--swap-disk-dir" in row.swap)
    most = 1.5 if row.flags == SKIPS_STEPS else 1
    num_steps = len(run.summary["steps"])
    loaded = run.summary["optimizer_in_bytes"] / run.summary["optimizer_out_bytes"]
    assert (num_steps - 1) / num_steps <= loaded < most

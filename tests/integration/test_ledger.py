"""The memory report of a run's summary, compared with the run's checkpoint and flags."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.harness import SWAP_SMALL, Run, Trainer, load_checkpoint, recorded
from tests.integration.rows import BF16, DISTRIBUTED, ON_DISK


def weights_bytes(run: Run) -> int:
    """Return the bytes of the model's weights in the last checkpoint, without buffers."""
    leaves = load_checkpoint(run.directory / "checkpoint")
    found = [value for name, value in leaves.items() if "/model/" in name and isinstance(value, torch.Tensor)]
    assert found
    return sum(value.numel() * value.element_size() for value in found)


def memory(run: Run, rank: int = 0) -> dict[str, dict[str, Any]]:
    return {row["kind"]: row for row in run.summary["ranks"][rank]["memory"]}


def assert_booked(run: Run, rank: int = 0) -> None:
    """Check that the report has all host memory and disk space that the run took."""
    told, rows = run.summary["ranks"][rank], memory(run, rank).values()
    assert sum(row["host_bytes"] for row in rows) == told["host_booked_bytes"] + told["optimizer_host_bytes"]
    assert sum(row["disk_bytes"] for row in rows) == told["optimizer_disk_bytes"]
    assert all(row[f"{tier}_bytes"] >= 0 for row in rows for tier in ("device", "host", "disk"))


def test_nothing_is_swapped(trainer: Trainer) -> None:
    run = trainer.unswapped(saved="torch")
    found, weights = memory(run), weights_bytes(run)
    assert found["weights"]["device_bytes"] == weights
    assert found["gradients"]["device_bytes"] == weights
    assert 2 * weights <= found["optimizer"]["device_bytes"] < 2.01 * weights  # two moments, and counters of steps
    assert found["activations"]["device_bytes"] == run.summary["saved_peak_bytes"] > 0
    assert_booked(run)
    assert sum(row["host_bytes"] for row in found.values()) == 0


def test_activations_in_host_memory(trainer: Trainer) -> None:
    run = trainer.run(f"{SWAP_SMALL} --swap-layers all {recorded('torch')}")
    assert memory(run)["activations"]["host_bytes"] == run.summary["host_leased_peak_bytes"] > 0
    assert_booked(run)


@pytest.mark.parametrize("on_disk", ["", ON_DISK])
def test_optimizer_state_at_rest(trainer: Trainer, on_disk: str) -> None:
    flags = f"{SWAP_SMALL} --swap-min-mib 0 --swap-optimizer 1 {on_disk}"
    run = trainer.run(f"{BF16} {flags} {recorded('torch')}")
    found, weights = memory(run), weights_bytes(run)
    assert found["weights"]["device_bytes"] == weights
    assert found["gradients"]["device_bytes"] == 2 * weights
    row = found["optimizer"]
    assert row["host_bytes"] + row["disk_bytes"] == 6 * weights  # main values and two moments in fp32
    assert (row["disk_bytes"] > 0) == bool(on_disk)
    assert row["device_bytes"] < 0.01 * weights
    assert_booked(run)


@pytest.mark.short
def test_saved_in_its_last_step(trainer: Trainer) -> None:
    """Offloaded state is materialized for the checkpoint. The report shows it as ordinary tensors."""
    flags = f"{BF16} {SWAP_SMALL} --swap-min-mib 0 --swap-optimizer 1 {recorded('torch')}"
    run = trainer.run(f"{flags} --exit-interval 3 {ON_DISK}", check=False)
    row, weights = memory(run)["optimizer"], weights_bytes(run)
    assert row["host_bytes"] + row["disk_bytes"] == 6 * weights
    assert row["device_bytes"] < 0.01 * weights


def test_two_ranks_share_the_state(trainer: Trainer) -> None:
    flags = f"{BF16} {DISTRIBUTED} {SWAP_SMALL} --swap-min-mib 0 --swap-optimizer 1"
    run = trainer.run(f"{flags} {recorded('torch')}", ranks=2)
    plain = trainer.run(f"{BF16} {recorded('torch')}")
    weights, rests = weights_bytes(plain), 0
    for rank in range(2):
        found = memory(run, rank)
        assert weights <= found["weights"]["device_bytes"] < 1.01 * weights  # buffers that are padded
        assert found["gradients"]["device_bytes"] == 2 * found["weights"]["device_bytes"]
        rests += found["optimizer"]["host_bytes"]
        assert_booked(run, rank)
    assert rests == 6 * weights

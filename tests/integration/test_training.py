"""One process: what the rows of the matrix cannot say."""

import pytest

from megatron.swap.common.types import GIB
from tests.integration.harness import (
    SWAP_SMALL,
    Trainer,
    assert_same_training,
    assert_swapped,
    recorded,
)
from tests.integration.rows import ALL, TENSOR


@pytest.mark.nightly
def test_by_torchrun(trainer: Trainer) -> None:
    """torchrun starts fresh processes, as for users."""
    plain = trainer.unswapped(TENSOR, ranks=2, saved="torch")
    run = trainer.run(f"{TENSOR} {SWAP_SMALL} {ALL} {recorded('torch')}", ranks=2, fresh=True)
    assert_same_training(plain, run)
    assert_swapped(run)


def test_the_comparison_sees_a_small_difference(trainer: Trainer) -> None:
    """Results differ after a slightly larger step size."""
    plain = trainer.unswapped()
    with pytest.raises(AssertionError):
        assert_same_training(plain, trainer.live("--lr 1.000001e-3"))


@pytest.mark.parametrize(
    ("swap", "host_gib"),
    [pytest.param("--swap-verify", 0.0073, marks=pytest.mark.short),
     pytest.param("--swap-optimizer 1", 0.0195, marks=pytest.mark.nightly)],
)
def test_activations_on_disk_where_host_memory_is_short(trainer: Trainer, swap: str, host_gib: float) -> None:
    """Host memory has room for the buffers between disk and device, and little more."""
    _, run = trainer.pair("", f"{ALL} {swap} --swap-disk-dir . --swap-host-gib {host_gib}")
    summary = run.summary
    assert summary["disk_leased_peak_bytes"] > 0
    assert summary["host_booked_bytes"] + summary["optimizer_host_bytes"] <= host_gib * GIB
    rows = {row["kind"]: row for row in summary["ranks"][0]["memory"]}
    assert rows["activations"]["disk_bytes"] == summary["disk_leased_peak_bytes"]
    on_disk = sum(row["disk_bytes"] for row in rows.values())
    assert on_disk == summary["disk_booked_bytes"] + summary["optimizer_disk_bytes"]

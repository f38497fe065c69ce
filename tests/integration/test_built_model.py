"""``swap.install`` on models that exist already: each version of Megatron, with and without its trainer.

``tests/support.py`` makes rows of the table of versions in docs/reference/support.md from ``FEATURES``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.swap.patches.registry import BUILT_ONLY, VERSIONS
from tests.integration.versions import folder_of
from tests.ports import free_port
from tests.sizes import IS_NIGHTLY

SCRIPT = Path(__file__).with_name("built_script.py")
MEGATRON = (*BUILT_ONLY, *VERSIONS["megatron-core"])
FEATURES = {
    "`swap.install`: offload, a fork's layers and model": ("layers", "during training", "fork"),
    "`swap.install`: recompute": ("recompute",),
    "`swap.install`: `loss_chunks`, one": ("loss",),
    "`swap.install`: Megatron's full recomputation": ("full recomputation",),
    "`swap.install`: planner": ("budget", "passes without gradients"),
    "`swap.install`: optimizer state": ("state", "distributed state during training", "budget with state"),
}  # fmt: skip
"""Features whose runs are equal to the bit with each version, and their cases in ``built_script.py``."""
IN_ALL = ("fork", "budget with state")
"""Cases of ``tests/run.sh --all``: these have the planner, the optimizers and a fork."""
ON_TWO_RANKS = ("during training", "distributed state during training")
ON_GPU = ("layers", "recompute", "fork", "full recomputation", "state", *ON_TWO_RANKS)
"""Cases without a budget: those of a few MiB mean nothing where CUDA's allocator hands out 2 MiB at a time."""
TIMEOUT_S = 240

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="its cases are for machines without CUDA")


def rows_of(version: str, cases: tuple[str, ...], num_ranks: int = 1) -> list[dict[str, Any]]:
    port = free_port()
    folder = folder_of(version)
    path = os.environ.get("PYTHONPATH", "") if folder is None else str(folder)
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *cases],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                 "TORCHDYNAMO_DISABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    printed = []
    for process in running:
        try:
            printed.append(process.communicate(timeout=TIMEOUT_S)[0])
        except subprocess.TimeoutExpired:
            for other in running:
                other.kill()
            printed.append(process.communicate()[0])
    assert [process.returncode for process in running] == [0] * num_ranks, "\n".join(printed)[-4000:]
    rows = [json.loads(line) for line in printed[0].splitlines() if line.startswith("{")]
    assert [row["case"] for row in rows] == list(cases)
    for row in rows:
        assert row["version"] == version
        assert folder is None or Path(row["file"]).is_relative_to(folder)
    return rows


def assert_equal(row: dict[str, Any]) -> None:
    """Check that swapping changed no bit, moved bytes, kept to its budget and left nothing on the model."""
    plain, swapped, case = row["plain"], row["swapped"], row["case"]
    stats = swapped["stats"]
    assert plain["losses"] == swapped["losses"], case
    assert plain["digest"] == swapped["digest"], case
    assert stats["out_bytes"] > 0, case
    if stats["budget_gib"] is None:  # else the planner decides about state
        assert ("state" in case) == (stats["state_bytes"] > 0), case
    else:
        assert stats["stage"] == "stable", case
        assert stats["peak_gib"] <= stats["budget_gib"], case
    assert swapped["left"] == [], case


@needs_no_gpu
@pytest.mark.parametrize(
    "version", [*(pytest.param(one, marks=pytest.mark.nightly) for one in MEGATRON[:-1]), MEGATRON[-1]]
)
def test_equal_to_the_bit(version: str) -> None:
    for row in rows_of(version, tuple(case for cases in FEATURES.values() for case in cases) if IS_NIGHTLY else IN_ALL):
        assert_equal(row)


@needs_no_gpu
@pytest.mark.nightly
def test_two_data_parallel_ranks() -> None:
    for row in rows_of(MEGATRON[-1], ON_TWO_RANKS, num_ranks=2):
        assert_equal(row)


@pytest.mark.gpu
def test_equal_to_the_bit_on_a_gpu() -> None:
    for row in rows_of(MEGATRON[-1], ON_GPU):
        assert_equal(row)

"""The benchmark of transformers' Trainer, on the CPU: every method trains to the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from benchmarks import trainer
from benchmarks.machine import ROOT

TINY = "--layers 4 --hidden-size 64 --vocab-size 256 --tokens 64 --steps 2"


def row_of(method: str) -> dict[str, Any]:
    """Run a process of its own: accelerate's settings are a process's, and a run that fails leaves its guard on."""
    command = [sys.executable, "-m", "benchmarks.trainer", *TINY.split(), "--method", method]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_every_method_trains_to_the_same_losses() -> None:
    rows = [row_of(method) for method in ("nothing", "checkpointing", "0.0012")]
    num_steps = trainer.WARM_UP + 2
    assert len(rows[0]["losses"]) == num_steps
    assert len({tuple(row["losses"][:num_steps]) for row in rows}) == 1
    assert rows[2]["stage"] == "stable"


@pytest.mark.slow
def test_a_budget_without_a_plan_says_so() -> None:
    assert "no plan stays below" in str(row_of("0.00001")["infeasible"])

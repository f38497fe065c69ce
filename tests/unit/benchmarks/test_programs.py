"""Benchmark programs with rows of their own, as far as they run without a GPU and without other libraries."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import ROOT
from megatron.swap.common.plan import load_plan

# ------------------------------------------------------------------------------------------- any model

TINY = "--layers 3 --tokens 16 --hidden-size 32 --vocab-size 64 --steps 2"


def measured(*methods: str) -> list[dict[str, Any]]:
    """Return the row of each method of the benchmark of any model."""
    any_model = pytest.importorskip("benchmarks.any_model", exc_type=ImportError)
    parse = any_model.parser().parse_args
    return [any_model.measure(parse([*TINY.split(), "--method", *method.split()])) for method in methods]


@pytest.mark.slow
def test_any_model_computes_the_same_losses_with_every_method(tmp_path: Path) -> None:
    save = f"--save {tmp_path}/new"
    rows = measured(*(f"{method} {save}" for method in ("nothing", "checkpointing", "1e-4", "1e-4 --prepared-mask")))
    assert len({tuple(row["losses"]) for row in rows}) == 1
    assert rows[2]["stage"] == "stable"
    assert rows[2]["peak_gib"] <= 1e-4
    assert {one.name for one in (tmp_path / "new").iterdir()} == {"plan-1e-4.json", "profile-1e-4.json"}
    assert load_plan(str(tmp_path / "new" / "plan-1e-4.json")).predicted is not None


# ------------------------------------------------------------------------------------------- transformers' Trainer


def trained(method: str) -> dict[str, Any]:
    """Run a process of its own: accelerate's settings are a process's, and a run that fails leaves its guard on."""
    tiny = "--layers 4 --hidden-size 64 --vocab-size 256 --tokens 64 --steps 2"
    command = [sys.executable, "-m", "benchmarks.trainer", *tiny.split(), "--method", method]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.nightly
def test_the_trainer_computes_the_same_losses_with_every_method() -> None:
    pytest.importorskip("accelerate")
    from benchmarks.trainer import WARM_UP

    num_steps = WARM_UP + 2
    rows = [trained(method) for method in ("nothing", "checkpointing", "0.0012")]
    assert len(rows[0]["losses"]) == num_steps
    assert len({tuple(row["losses"][:num_steps]) for row in rows}) == 1
    assert rows[2]["stage"] == "stable"
    assert "no plan stays below" in str(trained("0.00001")["infeasible"])

"""The benchmark of transformers' Trainer, on the CPU: every method trains to the same losses."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from benchmarks import trainer

TINY = "--layers 4 --hidden-size 64 --vocab-size 256 --tokens 64 --steps 2"


def row_of(capsys: pytest.CaptureFixture[str], method: str) -> dict[str, object]:
    trainer.main([*TINY.split(), "--method", method])
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


@pytest.mark.slow
def test_every_method_trains_to_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row_of(capsys, method) for method in ("nothing", "checkpointing", "0.0012")]
    num_steps = trainer.WARM_UP + 2
    assert len(rows[0]["losses"]) == num_steps
    assert len({tuple(row["losses"][:num_steps]) for row in rows}) == 1
    assert rows[2]["stage"] == "stable"


@pytest.mark.slow
def test_a_budget_without_a_plan_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no plan stays below" in str(row_of(capsys, "0.00001")["infeasible"])

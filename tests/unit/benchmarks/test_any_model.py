"""The benchmark of any model, on the CPU: every method computes the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
from benchmarks import any_model
from megatron.swap.common.plan import load_plan

TINY = "--layers 3 --tokens 16 --hidden-size 32 --vocab-size 64 --steps 2"


@pytest.mark.slow
def test_every_method_computes_the_same_losses(tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "new"))
    rows = {
        method: any_model.measure(any_model.parser().parse_args([*TINY.split(), "--method", *method.split(), *save]))
        for method in (any_model.NOTHING, any_model.CHECKPOINTING, "1e-4", "1e-4 --prepared-mask")
    }
    assert len({tuple(row["losses"]) for row in rows.values()}) == 1
    assert rows["1e-4"]["stage"] == "stable"
    assert rows["1e-4"]["peak_gib"] <= 1e-4
    assert {one.name for one in (tmp_path / "new").iterdir()} == {"plan-1e-4.json", "profile-1e-4.json"}
    assert load_plan(str(tmp_path / "new" / "plan-1e-4.json")).predicted is not None

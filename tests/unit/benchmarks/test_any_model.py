"""The benchmark of any model, on the CPU: every method computes the same losses."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from benchmarks import any_model

TINY = "--layers 3 --tokens 16 --hidden-size 32 --vocab-size 64 --steps 2"


@pytest.mark.slow
def test_every_method_computes_the_same_losses() -> None:
    rows = {
        method: any_model.measure(any_model.parser().parse_args([*TINY.split(), "--method", method]))
        for method in (any_model.NOTHING, any_model.CHECKPOINTING, "1e-4")
    }
    assert len({tuple(row["losses"]) for row in rows.values()}) == 1
    assert rows["1e-4"]["stage"] == "stable"
    assert rows["1e-4"]["peak_gib"] <= 1e-4

"""The benchmark of inference with weights in host memory, on the CPU: every method decodes the same tokens."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from benchmarks import weights_inference

TINY = "--shape tiny --batch 2 --tokens 8 --decode 3 --steps 1 --device-layers 1"


@pytest.mark.slow
def test_every_method_decodes_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {}
    for method in ("swap", "accelerate", "device"):
        weights_inference.main([*TINY.split(), "--method", method])
        rows[method] = json.loads(capsys.readouterr().out)
    assert len({tuple(row["decoded"]) for row in rows.values()}) == 1
    assert {method: row["device_layers"] for method, row in rows.items()} == {"swap": 1, "accelerate": 1, "device": 4}

"""The benchmark of inference with weights in host memory, on the CPU: every method decodes the same tokens."""

from __future__ import annotations

import json

import pytest
import torch

from megatron.swap.params.packed_weights import Layer
from megatron.swap.params.weight_buffers import Use, WeightBuffers

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


def test_digests_are_those_of_the_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {}
    for method in ("swap", "device"):
        weights_inference.main([*TINY.split(), "--method", method, "--digests", "weights"])
        rows[method] = json.loads(capsys.readouterr().out)
    assert rows["swap"]["outputs"] == rows["device"]["outputs"]
    assert len(rows["swap"]["outputs"]) == 5
    assert rows["swap"]["weights"] == rows["device"]["weights"]
    assert not rows["swap"]["wrong_weights"]

    begin = WeightBuffers.begin_forward

    def damage(buffers: WeightBuffers, layer: Layer, use: Use) -> None:
        begin(buffers, layer, use)
        if layer.number == 2:
            layer.weights[0].tensor.data.view(torch.int16)[0] += 1

    monkeypatch.setattr(WeightBuffers, "begin_forward", damage)
    weights_inference.main([*TINY.split(), "--method", "swap", "--digests", "weights"])
    assert json.loads(capsys.readouterr().out)["wrong_weights"] == [[call, 3] for call in range(5)]


def test_weights_that_accelerate_moves_have_no_digest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        weights_inference.main([*TINY.split(), "--method", "accelerate", "--digests", "weights"])
    assert "goes with --method swap and device, not with accelerate" in capsys.readouterr().err

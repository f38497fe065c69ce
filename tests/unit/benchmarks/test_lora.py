"""The benchmark of LoRA with frozen weights in host memory, on the CPU: where weights are changes no loss."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("peft")
from benchmarks import large_model, lora

TINY = "--shape tiny --tokens 32 --chunk 16 --steps 1 --rank 2"


def test_layers_on_the_device_are_spread() -> None:
    assert large_model.evenly(0, 4) == set()
    assert sorted(large_model.evenly(3, 10)) == [0, 3, 6]
    assert large_model.evenly(4, 4) == {0, 1, 2, 3}


@pytest.mark.slow
def test_losses_do_not_depend_on_where_weights_are(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    with pytest.raises(SystemExit, match="--host-gib is for activations that are swapped"):
        lora.main([*TINY.split(), "--host-gib", "1"])
    for more in ("", "--device-layers 1", "--device-layers 0 --activations 0-3", "--device-layers 2 --activations 1.0"):
        lora.main([*TINY.split(), *more.split()])
        rows.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert len({tuple(row["losses"]) for row in rows}) == 1
    assert rows[0]["losses"][0] > rows[0]["losses"][1]
    assert [row["device_layers"] for row in rows] == [4, 1, 0, 2]
    assert rows[3]["stage"] == "stable"
    lora.main(f"{TINY} --norms torch --adapters q-v --activations 1.0 --host-gib 0.2".split())
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["norms"], row["adapters"], row["host_gib"], row["stage"]) == ("torch", "q-v", 0.2, "stable")
    assert row["losses"][0] == pytest.approx(rows[0]["losses"][0], rel=1e-2)

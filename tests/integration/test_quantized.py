"""Runs of ``quantized_script.py``, in one process a recipe: equal to the bit, the quantizers' scales included."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ports import free_port

SCRIPT = Path(__file__).with_name("quantized_script.py")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
IN_8_BITS = ("tensorwise", "delayed", "blockwise", "first and last layer in bf16")


@pytest.mark.parametrize("recipe", ["none", *(pytest.param(recipe, marks=ON_GPU) for recipe in IN_8_BITS)])
@pytest.mark.nightly
def test_every_run_is_equal_to_the_bit(recipe: str) -> None:
    if recipe != "none":
        pytest.importorskip("transformer_engine.pytorch")
    env = {
        **os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }  # fmt: skip
    done = subprocess.run([sys.executable, str(SCRIPT), recipe], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {row["run"]: row for row in map(json.loads, re.findall("^{.*$", done.stdout, re.MULTILINE))}
    without_copies = ["weights recomputed"] if recipe not in ("none", "delayed") else []
    names = ["plain", "all layers", "recomputed", *without_copies, "plan", "whole layers", "state"]
    assert list(rows) == names
    plain = rows["plain"]
    assert plain["has_learned"]
    assert (plain["num_scales"] > 0) == (recipe == "delayed"), "other recipes keep none"
    for name, row in rows.items():
        assert row["losses"] == plain["losses"], name
        assert row["digest"] == plain["digest"], name
        assert (row["num_copies"] > 0) == (recipe != "none" and name not in without_copies), name
        assert "stats" not in row or row["stats"]["in_bytes"] > 0, name
    assert rows["recomputed"]["recomputed_bytes"] > 0
    assert not [said for said in rows["recomputed"]["refused"] if "different bits" in said]
    assert rows["whole layers"]["stats"]["out_bytes"] < rows["plan"]["stats"]["out_bytes"]
    assert rows["state"]["stats"]["state_bytes"] > 0

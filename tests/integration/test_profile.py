"""tools/profile.sh as a new user runs it, without a GPU."""

import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.integration.harness import CHECKED, ROOT

SMALL = "--num-layers 6 --hidden-size 64 --seq-length 64 --max-position-embeddings 64 --swap-min-mib 0.001"


def profile(folder: Path, *flags: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run it on the tiny preset, made smaller, with two micro-batches a step."""
    data = ["--mock-data", "--micro-batch-size", "2", "--global-batch-size", "4"]
    return subprocess.run(
        ["bash", str(ROOT / "tools" / "profile.sh"), *SMALL.split(), *data, *flags],
        env={
            **os.environ, **CHECKED, "PROFILE_DIR": str(folder), "PROFILE_STEPS": "3", "OMP_NUM_THREADS": "1",
            **settings,
        },
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at what a machine without a GPU leaves")
@pytest.mark.nightly
def test_a_run_is_traced_and_judged(tmp_path: Path):
    done = profile(tmp_path / "new", "--swap-layers", "0-5", "--swap-cpu-delay-ms", "1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "clean: every copy ran in order; number and bytes match the summary" in done.stdout
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {
        "about.json", "run.json", "rank-0.json.gz", "findings.json", "copies.csv", "trace.perfetto.json.gz",
    }  # fmt: skip
    findings = json.loads((tmp_path / "new" / "findings.json").read_text())
    summary = json.loads((tmp_path / "new" / "run.json").read_text())
    assert [step["step"] for step in findings["steps"]] == [3]
    assert findings["steps"][0]["copies"]["swapped_out_bytes"] == summary["steps"][2]["swapped_out_bytes"] > 0
    assert findings["about"]["command"].startswith("bash tools/profile.sh --num-layers 6")
    assert findings["violations"] == findings["mismatches"] == []
    assert all(check["num_checked"] for check in findings["checks"].values())
    with gzip.open(tmp_path / "new" / "trace.perfetto.json.gz") as file:
        assert json.load(file)["traceEvents"]
    before = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    again = profile(tmp_path / "new", "--swap-layers", "0-5", "--swap-memmory", "3")
    assert again.returncode != 0
    assert "holds what another run has found. Name another PROFILE_DIR" in again.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == before


def test_settings_that_cannot_work_are_told_before_training(tmp_path: Path):
    for settings, words in (
        ({"PROFILER": "perf"}, "choose nsys or torch"),
        ({"PROFILER": "nsys", "NSYS": "/nowhere", "PATH": os.environ["PATH"]}, "PROFILER=nsys, but"),
        ({"PROFILE_STEPS": "1-2"}, "--swap-profile-steps 1-2"),
    ):
        done = profile(tmp_path, "--swap-layers", "0-5", **settings)
        assert done.returncode != 0
        assert words in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        assert not list(tmp_path.glob("rank-*"))

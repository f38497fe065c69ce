"""A sweep on the real trainer: real steps decide, and an interruption costs only the run that it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.rows import GIB, check_sweep_row, read_rows
from benchmarks.sweeps.forecast import MARGIN, Tiers
from benchmarks.sweeps.sweep import SWEEPS, load_sweep
from benchmarks.sweeps.table import largest_by_method
from tests.integration.harness import ROOT

COMMAND = [sys.executable, str(ROOT / "tools" / "sweep.py")]
PATIENCE_S = 200.0


@pytest.mark.nightly
def test_a_small_sweep_interrupted_and_resumed(tmp_path: Path) -> None:
    """The models have four or eight layers. The host memory limit suffices for the optimizer state of four layers, and
    the emulated device for four layers without offload."""
    content = (SWEEPS / "quick.toml").read_text().split("[methods]")[0]
    content = content.replace("last = 20", "last = 8")
    sweep, output = tmp_path / "small.toml", tmp_path / "rows.jsonl"
    sweep.write_text(f'{content}[methods]\nnone = "none"\n')
    # A little less than the state of eight layers takes: the memory model is not sure enough to leave that run out.
    host_gib = 8 * load_sweep(str(sweep)).trial("none", 1, Tiers(None, 8.0, 0.0), None).params / GIB / (1 + MARGIN / 2)
    ours = f"ours --swap-optimizer 1 --swap-host-gib {host_gib:.6f} --swap-host-unchecked"
    methods = f'none = "none"\nours-host = "{ours}"\nours-layers = "ours --swap-layers all"\n'
    sweep.write_text(f"{content}[methods]\n{methods}")
    env = {**os.environ, "TMPDIR": str(tmp_path), "SWAP_COMMIT": "c0ffee"}
    command = [*COMMAND, "--sweep", str(sweep), "--output", str(output)]
    first = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE_S
    while first.poll() is None and not output.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130, said
    kept = read_rows(output, check_sweep_row)

    done = subprocess.run([*command, "--resume"], env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_rows(output, check_sweep_row)
    assert [row for row in rows if row in kept] == kept
    found = {one.method: one for one in largest_by_method(rows)}
    none, host, layers = (found[name] for name in ("none", "ours-host", "ours-layers"))
    assert none.best is not None
    assert none.best["value"] == 4
    assert none.stopped_by == "8 layers: out of device memory"
    assert host.best is not None, done.stdout
    assert host.best["value"] == 4
    assert host.stop is not None
    assert (host.stop["value"], host.stop["outcome"]) == (8, "oom_host")
    assert "Raise --swap-host-gib, offload less (a lower --swap-optimizer)" in host.stop["output_tail"]
    assert layers.best is not None
    assert layers.best["value"] == 8, "what unswapped runs out of memory"
    for row in (none.best, host.best, layers.best):
        assert len(row["losses"]) == 10
        assert row["loss_last"] < row["loss_first"]
        assert row["mfu"] is None
        assert row["num_params"] == pytest.approx(row["params"], rel=0.01)
    table = output.with_suffix(".md").read_text()
    assert "| none | 4 layers |" in table
    assert "tokens/s" not in table
    assert output.with_suffix(".png").exists()

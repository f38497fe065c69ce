"""The benchmark on the real trainer: every method of the quick suite, interrupted once and resumed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.rows import read_rows
from tests.integration.harness import ROOT

BENCH = [sys.executable, str(ROOT / "tools" / "bench.py")]
COMMAND = [*BENCH, "--suite", "quick", "--case", "L6-h64"]
PATIENCE_S = 120.0


def processes_of(folder: Path) -> list[str]:
    """Return the measured processes that keep their files in ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text()
        except OSError:
            continue
        if "benchmarks.runner.child" in command and str(folder) in command:
            found.append(command)
    return found


@pytest.mark.nightly
def test_the_quick_suite_interrupted_and_resumed(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    env = {**os.environ, "TMPDIR": str(tmp_path), "SWAP_COMMIT": "c0ffee"}
    first = subprocess.Popen(
        [*COMMAND, "--output", str(output)], env=env, stdout=subprocess.PIPE, text=True,
        # A shell's background jobs ignore the signal. So would this process if the tests run in such a job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    while first.poll() is None and not output.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130, said
    assert "finished runs are kept, continue with --resume" in said
    # A process that the signal caught as it began has nobody to end it: it ends by itself behind its imports.
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []
    kept = read_rows(output)
    assert 1 <= len(kept) < 6

    done = subprocess.run(
        [*COMMAND, "--output", str(output), "--resume"], env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"quick: {6 - len(kept)} runs to do" in done.stdout
    rows = read_rows(output)
    assert rows[: len(kept)] == kept
    assert [row["method"] for row in rows] == [
        "none", "full-recompute", "recompute-mlp", "save-on-cpu", "ours-all", "ours-all-full-recompute",
    ]  # fmt: skip
    for row in rows:
        assert row["outcome"] == "ok", row["output_tail"]
        assert row["losses_equal"] is True, row["method"]
        assert len(row["losses"]) == len(set(row["losses"])) == 5, "the model learns"
        assert len(row["step_ms_all"]) == 3
        assert row["commit"] == "c0ffee"
        assert row["began_cuda_early"] is False
    swapped = {row["method"]: row["swapped_out_bytes"] for row in rows if row["is_ours"]}
    assert 0 < swapped["ours-all-full-recompute"] < swapped["ours-all"]
    assert all(row["swapped_out_bytes"] is None for row in rows if not row["is_ours"])
    held = {row["method"]: row["saved_peak_gib"] for row in rows}
    assert held["save-on-cpu"] is None, "its hooks hide the tensors"
    # Two layers are held, and what the last one's backward reloads; a recomputed layer is held whole.
    assert held["none"] / 12 < held["ours-all-full-recompute"] < held["full-recompute"] < held["none"] / 4
    assert held["ours-all"] < held["none"] / 2
    table = output.with_suffix(".md").read_text()
    assert table.count("| equal to the bit |") == 5
    assert output.with_suffix(".png").exists()
    assert processes_of(tmp_path) == []

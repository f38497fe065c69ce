"""Fabricated results for the tests of the report."""

from pathlib import Path
from typing import Any

from benchmarks.report.build import APPENDIX, render
from benchmarks.report.build import context as context_of
from benchmarks.report.results import read_results
from benchmarks.rows import GIB, UNPLANNED, Row

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
SHAPE = (
    "--num-layers 8 --hidden-size 1024 --seq-length 2048 --micro-batch-size 2 --global-batch-size 4 "
    "--swap-host-gib 9 --swap-host-unchecked --train-iters 7"
)
ONLY_NONE = {"forward_ms": 101.0, "first_layer_forward_ms": 1.0, "backward_ms": 200.0}
LINK = {"d2h_gb_s": 50.0, "h2d_gb_s": 50.0}


def a_row(method: str, step_ms: float | None, peak_gib: float | None, more: str = "", **fields: Any) -> Row:
    """Return a row of a benchmark. Without a step time the run exceeded the device's memory."""
    worked = step_ms is not None
    return {
        "suite": "h200-dense", "case": "small", "method": method, "flags": f"{SHAPE} {more}".strip(),
        "outcome": "ok" if worked else "oom_device", "output_tail": None if worked else "CUDA out of memory",
        "step_ms_median": step_ms, "step_ms_all": [step_ms - 1, step_ms, step_ms + 1] if worked else None,
        "step_ms_min": step_ms - 1 if worked else None, "step_ms_max": step_ms + 1 if worked else None,
        "first_step_ms": 5000.0 if worked else None, "device_peak_gib": peak_gib,
        "device_static_gib": 10.0 if worked else None, "device_reserved_gib": peak_gib,
        "host_peak_gib": 0.5 if worked else None, "tokens_per_s": 8192 / step_ms * 1e3 if worked else None,
        "num_params": 10**9 if worked else None, "loss_hex": "0x1.8p+3" if worked else None,
        "losses_equal": (method == "none") if worked else None, "loss_max_rel_diff": 0.0 if worked else None,
        "reference": "none", "num_rounds": 1, "what": f"What {method} is.", "is_ours": "--swap-layers" in more,
        "env": {}, "wrap": None, "link": LINK, "versions": {"torch": "2.11.0"},
        "machine": {"gpu": "Some GPU", "num_gpus": 1}, "commit": "0123456789", "command": "python tools/bench.py",
        **UNPLANNED, **fields,
    }  # fmt: skip


def ours(method: str, step_ms: float | None, peak_gib: float | None, gib: float, more: str, **fields: Any) -> Row:
    """Return a row of ours. ``gib``: offloaded by each of its two micro-batches."""
    moved = int(2 * gib * GIB)
    fields = {"swapped_out_bytes": moved, "swapped_in_bytes": moved, "host_peak_gib": gib, "num_late": 0, **fields}
    return a_row(method, step_ms, peak_gib, more, **fields)


RECOMPUTE = "--recompute-granularity selective --recompute-modules mlp"


def suite() -> list[Row]:
    """Return a suite of two micro-batches a step: 100 ms of forward hide 4.66 GiB of 18 GiB in total."""
    return [
        a_row("none", 700.0, 40.0, **ONLY_NONE),
        a_row("recompute-mlp", 800.0, 24.0, RECOMPUTE, losses_equal=False),
        a_row("full-recompute", 900.0, 15.0, "--recompute-granularity full"),
        a_row("slow", 2000.0, 24.0, wrap="benchmarks.suites.baselines:save_on_cpu"),
        a_row("dies", None, None),
        a_row("cannot", None, None, outcome="refused", output_tail="Traceback\nAssertionError: not with this"),
        ours("ours-0-1", 701.0, 35.5, 4.5, "--swap-layers 0-1"),
        ours("ours-all", 1200.0, 22.0, 18.0, "--swap-layers all"),
        ours("ours-mlp", 860.0, 18.0, 6.0, f"--swap-layers all {RECOMPUTE}"),
        ours("ours-dies", None, None, 0.0, "--swap-layers 0-2"),
    ]


def markdown_of(docs: Path, page: str = APPENDIX) -> str:
    return render(context_of(read_results(docs / "results"), docs)[0], page)

"""A small sweep, and a fake of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rows import Row
from benchmarks.sweeps.forecast import Tiers
from benchmarks.sweeps.results import Scene, SweepResults
from benchmarks.sweeps.runner import Attempt, measure
from benchmarks.sweeps.sweep import Sweep, Trial, load_sweep
from megatron.swap.forecast.gpus import find_gpu

SHAPE = """
--transformer-impl transformer_engine --bf16 --vocab-size 32000 --hidden-size 5120 --ffn-hidden-size 13824 --swiglu
--num-attention-heads 40 --seq-length 4096 --micro-batch-size 1 --untie-embeddings-and-output-weights
--use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 --swap-host-gib 112
"""
HEAD = """
description = "x"
device = "gpu"
axis = "depth"
first = 16
last = 80
step = 2
micro_batches = 8
time_limit_s = 60
host_limit_gib = 118
"""
METHODS = """
[methods]
none = "none"
deep = "torchtune-offload-one-stream"
ours = "ours --swap-optimizer fit + full-recompute"
"""
FILE = f'{HEAD}flags = """{SHAPE}"""\n{METHODS}'
MACHINE = {"gpu": "NVIDIA H200", "num_gpus": 1, "cores": 16, "device_memory_gib": 139.8}
FACTS: dict[str, Any] = {"versions": {"torch": "2"}, "machine": MACHINE, "commit": "c0ffee", "link": None}
TIERS = Tiers(139.8, 118.0, 0.0)
GOOD = {
    "step_ms_median": 1000.0, "step_ms_all": [1000.0], "first_step_ms": 2000.0, "tokens_per_step": 32768,
    "step_flops": 10**14, "num_params": None, "device_peak_gib": 100.0, "device_reserved_gib": 101.0,
    "device_static_gib": 90.0, "host_peak_gib": 5.0, "losses": [(10.0 - i / 10).hex() for i in range(20)],
}  # fmt: skip


def a_sweep(folder: Path, content: str = FILE) -> Sweep:
    path = folder / "small.toml"
    path.write_text(content)
    return load_sweep(path)


def results_in(sweep: Sweep, folder: Path, *, resume: bool = False, **facts: Any) -> SweepResults:
    scene = Scene({**FACTS, **facts}, TIERS, find_gpu("h200"), "python tools/sweep.py")
    return SweepResults(sweep, folder / "rows.jsonl", scene, resume=resume)


class FakeTraining:
    """Trains what ``fits`` says, and records the requested runs."""

    def __init__(
        self, fits: Callable[[Trial], bool], outcome: str = "oom_device", stop_after: int | None = None
    ) -> None:
        self.asked: list[tuple[str, int]] = []
        self._fits, self._outcome, self._stop_after = fits, outcome, stop_after

    def __call__(self, sweep: Sweep, trial: Trial) -> Attempt:
        if len(self.asked) == self._stop_after:
            raise KeyboardInterrupt
        self.asked.append((trial.method.name, trial.value.number))
        if self._fits(trial):
            return "ok", {**GOOD, "num_params": trial.params}, None
        return self._outcome, {}, "its last words"


def search(sweep: Sweep, results: SweepResults, train: FakeTraining) -> dict[str, list[Row]]:
    """Return the rows by method."""
    assert measure(sweep, results, time_limit_s=None, on_done=lambda *_: None, train=train)
    return {name: [row for row in results.rows() if row["method"] == name] for name in sweep.methods}

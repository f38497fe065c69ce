"""Predict runs with `megatron-swap plan`, then paste the commands that it prints and measure them.

    python -m benchmarks.plan_points profile mla                     # on the GPU: profiles that predictions need
    python -m benchmarks.plan_points predict                         # anywhere: plans and predictions, to be committed
    python -m benchmarks.plan_points run dense-tight 8b-64k --output points.json       # on the GPU, after the commit
    python -m benchmarks.plan_points unswapped dense-1.3b --output points.json         # on the GPU, to compare with

`predict` writes a plan file for each point and `predictions.json` into docs/results/plan-points. `run` pastes a point's
command with --swap-summary behind it, and writes peaks and step times beside what was predicted. Points that are in
the output already are not run again, so an interrupted run resumes. Without names every point is meant.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, facts, now
from megatron.swap.cli import plan as planner
from megatron.swap.cli.training_command import training_command
from megatron.swap.common.leftovers import own_folder
from megatron.swap.common.plan import load_plan
from megatron.swap.common.records import write_text
from megatron.swap.common.types import GIB

FOLDER = Path("docs/results/plan-points")
PREDICTIONS = FOLDER / "predictions.json"
NUM_WARM_UP = 3
"""Steps that are not timed: the first ones reserve memory, and copies of optimizer state overlap with layers after."""
SETTLED = 40
"""The same where experts get other numbers of tokens in each step: kernels for new sizes are loaded for 10 to 20."""
TIMED_OUT = 124
TIME = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")

COMMON = (
    "--bf16 --mock-data --tokenizer-type NullTokenizer --lr 1e-4 --min-lr 1e-5 --lr-decay-style constant "
    "--eval-iters 0 --eval-interval 100000 --log-interval 1 --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-create-attention-mask-in-dataloader"
)
ON_GPU = f"--transformer-impl transformer_engine {COMMON}"
FUSED = ON_GPU.replace("--no-gradient-accumulation-fusion ", "")
ON_CPU = (
    f"--transformer-impl local --no-persist-layer-norm --no-rope-fusion --distributed-backend gloo --num-workers 0 "
    f"{COMMON.replace('--bf16 ', '')}"
)
DENSE = "--num-layers 16 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --vocab-size 32000"
LONG = f"{DENSE} --group-query-attention --num-query-groups 8"
LLAMA = (
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--vocab-size 128256"
)
STATE = "--use-distributed-optimizer --use-precision-aware-optimizer"
LEAN_STATE = f"{STATE} --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
CHUNKS = "--mlp-chunks-for-training 8 --swap-loss-chunks auto"
FLASH = "--attention-backend flash"
"""Needs the package flash-attn-4, which TransformerEngine then takes."""
WIDE = (
    "--num-layers 4 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --vocab-size 32000"
)
FP8 = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
NO_COPIES = "--swap-fp8-weights recompute "
FP8_BUDGETS = {
    "fp8-l16-tensorwise-60": 87.51, "fp8-l16-tensorwise-40": 79.94, "fp8-l16-tensorwise-28": 75.4,
    "fp8-l16-blockwise-60": 87.6, "fp8-l16-blockwise-40": 80.0, "fp8-l16-blockwise-28": 75.44,
    "fp8-l4-tensorwise-60": 88.56, "fp8-l4-blockwise-60": 88.62,
    "fp8-l16-tensorwise-no-copies": 77.7, "fp8-l16-blockwise-no-copies": 77.7, "fp8-l4-tensorwise-no-copies": 81.7,
}  # fmt: skip
"""GiB: static memory with FP8 weights, and that percentage of what the option `nothing` reserves beyond it. By the
planner, L4-h8192 does not fit at 40 and 28 %. Without copies of weights: the budgets of the suite h200-fp8 at 40 %."""


@dataclass(frozen=True)
class Point:
    """A run to predict and to measure.

    Attributes:
        options: options of plan.
        flags: training flags of the model and its batch.
        profile: file that the plan is made from, in place of a GPU's figures; relative to the repository.
        iterations: training steps.
        num_warm_up: the first of them, which are not timed.
        common: training flags of all points of a kind.
    """

    options: str
    flags: str
    profile: str | None = None
    iterations: int = 8
    num_warm_up: int = NUM_WARM_UP
    common: str = ON_GPU

    @property
    def training_flags(self) -> list[str]:
        """Training flags of the command that the user has."""
        return [*self.common.split(), *self.flags.split(), "--train-iters", str(self.iterations)]


def _sequences(length: int, micro: int, batch: int) -> str:
    return (f"--seq-length {length} --max-position-embeddings {length} --micro-batch-size {micro} "
            f"--global-batch-size {batch}")  # fmt: skip


HOST = "--host-gib 108"
WIDE_EXPERTS = (
    "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --moe-ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    f"--vocab-size 32000 {_sequences(8192, 2, 4)}"
)
WIDE_EXPERTS_PROFILE = f"{FOLDER}/profile-experts-wide.json"
POINTS = {
    "dense-1.3b": Point(f"--gpu h200 {HOST} --memory-gib 40",
                        "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 "
                        f"--vocab-size 50304 {_sequences(4096, 4, 8)}"),
    "dense-roomy": Point(f"--gpu h200 {HOST} --memory-gib 86", f"{DENSE} {_sequences(4096, 4, 8)}"),
    "dense-tight": Point(f"--gpu h200 {HOST} --memory-gib 70", f"{DENSE} {_sequences(4096, 4, 8)}"),
    "wide": Point(f"--gpu h200 {HOST} --memory-gib 82",
                  f"{WIDE} {_sequences(8192, 2, 4)}"),
    "grouped-queries": Point(f"--gpu h200 {HOST} --memory-gib 62", f"--num-layers 10 {LLAMA} {_sequences(8192, 1, 8)}"),
    "80-gb": Point(f"--gpu h200 {HOST} --memory-gib 75", f"--num-layers 13 {LLAMA} {_sequences(8192, 1, 4)}"),
    "32k": Point(f"--gpu h200 {HOST} --memory-gib 80", f"{LONG} {_sequences(32768, 1, 1)}"),
    "128k": Point(f"--gpu h200 {HOST} --memory-gib 100",
                  f"{LONG.replace('--num-layers 16', '--num-layers 6')} {_sequences(131072, 1, 1)}", iterations=6),
    "8b-8k": Point(f"--gpu h200 {HOST} --memory-gib 110",
                   f"--num-layers 32 {LLAMA} {STATE} --swap-optimizer auto {_sequences(8192, 1, 4)}"),
    "8b-64k": Point("--gpu h200 --host-gib 104 --memory-gib 134",
                    f"--num-layers 32 {LLAMA} {STATE} --swap-optimizer 1 {_sequences(65536, 1, 1)}", iterations=6),
    "experts": Point("--memory-gib 56",
                     "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 5504 --moe-ffn-hidden-size 5504 "
                     "--num-attention-heads 32 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm "
                     "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
                     f"--moe-aux-loss-coeff 1e-2 --vocab-size 32000 --swap-deterministic {_sequences(4096, 4, 8)}",
                     profile=f"{FOLDER}/profile-experts.json"),
    "experts-wide": Point("--memory-gib 68", WIDE_EXPERTS, profile=WIDE_EXPERTS_PROFILE, iterations=24),
    **{
        f"experts-settled-{gib}": Point(f"--memory-gib {gib}", WIDE_EXPERTS, profile=WIDE_EXPERTS_PROFILE,
                                        iterations=60, num_warm_up=SETTLED)
        for gib in (68, 65)
    },
    "mla": Point("--memory-gib 44",
                 "--num-layers 12 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 "
                 "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
                 f"--v-head-dim 128 --vocab-size 102400 {_sequences(4096, 4, 8)}",
                 profile=f"{FOLDER}/profile-mla.json"),
    **{
        name: Point(f"--gpu h200 {HOST} --memory-gib {gib:g}",
                    f"{DENSE if 'l16' in name else WIDE} {FP8[name.split('-')[2]]} "
                    f"{NO_COPIES if name.endswith('no-copies') else ''}"
                    f"{_sequences(4096, 4, 8) if 'l16' in name else _sequences(8192, 2, 4)}",
                    common=FUSED if name.endswith("no-copies") else ON_GPU)
        for name, gib in FP8_BUDGETS.items()
    },
    **{
        f"{kind}-8b-8k": Point(f"--gpu h200 {HOST} --memory-gib 134",
                               f"--num-layers 32 {LLAMA} {STATE} --swap-optimizer auto {flags}"
                               f"{_sequences(8192, 1, 16)}", common=FUSED)
        for kind, flags in (("bf16", ""), ("fp8", f"{FP8['tensorwise']} "))
    },
    "fp8-8b-no-copies": Point(f"--gpu h200 {HOST} --memory-gib 134",
                              f"--num-layers 32 {LLAMA} {STATE} --swap-optimizer auto {FP8['tensorwise']} "
                              f"{NO_COPIES}{_sequences(8192, 1, 16)}", common=FUSED),
    "residual": Point(f"--gpu h200 {HOST} --memory-gib 70",
                      f"--num-layers 10 {LLAMA} --swap-optimizer auto {_sequences(32768, 1, 1)}", common=FUSED),
    **{
        f"mlp-chunks-{gib}": Point(f"--gpu h200 {HOST} --memory-gib {gib}",
                                   f"--num-layers 4 {LLAMA} {CHUNKS} {_sequences(131072, 1, 1)}", common=FUSED)
        for gib in (60, 70)
    },
    **{
        f"long-{tokens // 1024}k": Point(f"--gpu h200 --host-gib 112 --memory-gib {gib}",
                                         f"--num-layers 32 {LLAMA} {state} {CHUNKS} {FLASH} --swap-optimizer auto "
                                         f"{_sequences(tokens, 1, batch)}",
                                         iterations=iterations, num_warm_up=min(1, iterations - 1), common=FUSED)
        for tokens, batch, state, iterations, gib in (
            (65536, 4, STATE, 4, 134), (131072, 4, STATE, 3, 134), (262144, 1, LEAN_STATE, 2, 134),
            (393216, 1, LEAN_STATE, 2, 132),
        )
    },
}  # fmt: skip
"""The points of an H200 with 112 GiB of host memory. Profiles are measured before predictions."""
CPU_POINTS = {
    "cpu": Point("--memory-gib 0.009",
                 "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --vocab-size 500 --swap-min-mib 0.05 "
                 f"{_sequences(128, 2, 4)}", profile="runs/profile-cpu.json", iterations=4, common=ON_CPU),
}  # fmt: skip
"""A point that shows on any machine that this program works."""


class PointError(Exception):
    """A point cannot be predicted or run; the message is one line."""


def profile(point: Point, budget_gib: float, path: str) -> None:
    """Train under a budget until a plan is chosen, and write the profile."""
    flags = [*point.training_flags[:-1], "24", "--swap-memory-gib", f"{budget_gib:g}", "--swap-save-profile", path]
    done = paste(training_command([], flags, 1, 1), 600.0)
    if done.returncode or not Path(path).exists():
        raise PointError(f"no profile was written:\n{done.stdout[-3000:]}")


def predict(name: str, point: Point, folder: Path) -> dict[str, Any] | None:
    """Plan a point and return its prediction; ``None``: its profile is not measured yet.

    Raises:
        PointError: it does not fit.
    """
    if point.profile is not None and not Path(point.profile).exists():
        return None
    path = folder / f"{name}.json"
    words = ["--save", str(path), *point.options.split()]
    words += ["--", *point.training_flags] if point.profile is None else ["--profile", point.profile]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status = planner.main(words)
    parts = out.getvalue().strip().split("\n\n")
    if status:
        raise PointError(f"{name}: {parts[0]}")
    speed = parts[2] if point.profile is None else parts[1]
    plan = load_plan(path)
    assert plan.predicted is not None
    chosen = ["--swap-plan", str(path)]
    return {
        "plan": shlex.join(["megatron-swap", "plan", *words]),
        "verdict": parts[0],
        "command": parts[1] if point.profile is None else training_command(point.training_flags, chosen, 1, 1),
        "budget_gib": plan.budget_gib,
        "device_gib": plan.predicted.peak_gib,
        "host_gib": _host_gib(speed),
        "step_ms": plan.predicted.step_ms,
        "num_warm_up": point.num_warm_up,
        "offload_fraction": plan.offload_fraction,
        "options": parts[3] if point.profile is None else parts[2],
    }


def _host_gib(speed: str) -> float:
    """Return the GiB of the row `host`."""
    found = re.search(r"^host\s+([\d.]+) (KiB|MiB|GiB)", speed, re.MULTILINE)
    assert found is not None, speed
    return float(found[1]) / {"KiB": 1 << 20, "MiB": 1 << 10, "GiB": 1}[found[2]]


def paste(command: str, limit_s: float, inherited: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell, as a user who pasted it, with this Python's programs first.

    ``inherited``: descriptors that it gets: locks of folders that nobody may remove while it runs.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = ["timeout", "-k", "10", f"{limit_s:g}", "bash", "-c", command]
    return subprocess.run(
        script, cwd=ROOT, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        pass_fds=inherited,
    )  # fmt: skip


def run(predicted: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Paste the command of a prediction and return what was measured beside what was predicted."""
    began = time.monotonic()
    with own_folder("swap-plan-point-") as (folder, owner):
        summary = folder / "run.json"
        done = paste(f"{predicted['command']} --swap-summary {summary}", limit_s, (owner,))
        found = json.loads(summary.read_text()) if done.returncode == 0 and summary.exists() else None
    step_ms = step_times(done.stdout)
    row = {"command": predicted["command"], "wall_s": round(time.monotonic() - began, 1)}
    row |= {f"predicted_{key}": predicted[key] for key in ("device_gib", "host_gib", "step_ms") if key in predicted}
    budget_gib = predicted.get("budget_gib", math.inf)
    if "budget_gib" in predicted:
        row["budget_gib"] = budget_gib
    if found is None:
        outcome = "timeout" if done.returncode == TIMED_OUT else "failed"
        return row | {"outcome": outcome, "step_ms_all": step_ms, "output_tail": done.stdout[-3000:]}
    reserved = found["device_reserved_bytes"] or found["saved_peak_bytes"]  # an emulated device reserves nothing
    timed = step_ms[predicted.get("num_warm_up", NUM_WARM_UP):] or step_ms
    median_ms = statistics.median(timed) if timed else None
    return row | {
        "outcome": "ok",
        "reserved_gib": reserved / GIB,
        "allocated_gib": (found["device_peak_bytes"] or 0) / GIB,
        "host_gib": (found["host_leased_peak_bytes"] + found["optimizer_host_bytes"]) / GIB,
        "num_alloc_retries": found["num_alloc_retries"],
        "losses": found["losses"],
        "step_ms_all": step_ms,
        "step_ms_median": median_ms,
        "is_within_budget": reserved / GIB <= budget_gib,
        "device_error": predicted["device_gib"] * GIB / reserved - 1 if "device_gib" in predicted else None,
        "step_error": predicted["step_ms"] / median_ms - 1 if median_ms and "step_ms" in predicted else None,
    }


def step_times(output: str) -> list[float]:
    """Return the milliseconds of each step by Megatron's log, whose second line is the mean of the first two steps."""
    printed = [float(text) for text in TIME.findall(output)]
    if len(printed) > 1:
        printed[1] = round(2 * printed[1] - printed[0], 1)
    return printed


def line(name: str, row: dict[str, Any]) -> str:
    """Return a row of a run in one line."""
    if row["outcome"] != "ok":
        return f"{name}: {row['outcome']} after {row['wall_s']} s"
    if "budget_gib" not in row:
        return f"{name}: {row['reserved_gib']:.2f} GiB; {row['step_ms_median']:,.0f} ms; {row['wall_s']} s"
    step = "no step" if row["step_error"] is None else f"{row['step_ms_median']:,.0f} ms ({row['step_error']:+.1%})"
    within = "within" if row["is_within_budget"] else "ABOVE"
    return (f"{name}: {row['reserved_gib']:.2f} GiB, {within} {row['budget_gib']:g} (predicted "
            f"{row['predicted_device_gib']:.2f}, {row['device_error']:+.1%}); {step}; {row['wall_s']} s")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, predict or run points. Return 0 if all that were asked for are done and within their budgets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("profile", "predict", "run", "unswapped"))
    parser.add_argument("names", nargs="*", help="points; default: all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="plans and predictions")
    parser.add_argument("--output", type=Path, help="run: JSON file of the rows")
    parser.add_argument("--limit-s", type=float, default=200.0, help="run: longest run of one point")
    parser.add_argument("--time-limit-s", type=float, default=540.0, help="run: begin no point after this")
    parser.add_argument("--memory-gib", type=float, default=100.0, help="profile: budget of the profiled run")
    parser.add_argument("--cpu", action="store_true", help="use the point for machines without a GPU")
    options = parser.parse_args(arguments)
    os.chdir(ROOT)  # plan files are named relative to the repository, as the printed commands have them
    points = CPU_POINTS if options.cpu else POINTS
    if unknown := set(options.names) - points.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no such point; there are {', '.join(points)}")
    names = options.names or list(points)
    file = options.folder / PREDICTIONS.name
    try:
        if options.what == "profile":
            for name in names:
                if points[name].profile is None:
                    raise PointError(f"{name}: is predicted without a profile; name a point that needs one")
                profile(points[name], options.memory_gib, points[name].profile or "")
        elif options.what == "predict":
            kept = json.loads(file.read_text())["points"] if file.exists() else {}
            made = {name: predict(name, points[name], options.folder) for name in names}
            kept |= {name: row for name, row in made.items() if row is not None}
            write_text(file, json.dumps({"points": kept}, indent=1) + "\n")
            print(*(f"{name}: {row['verdict'] if row else 'needs a profile'}" for name, row in made.items()), sep="\n")
        else:
            if options.what == "unswapped":
                flags = {name: points[name].training_flags for name in names}
                return run_all({f"{name} unswapped": {"command": training_command(one, [], 1, 1)}
                                for name, one in flags.items()}, options)  # fmt: skip
            predicted = json.loads(file.read_text())["points"]
            for name in set(names) - predicted.keys():
                print(f"{name}: has no prediction")
            done = run_all({name: predicted[name] for name in names if name in predicted}, options)
            return 1 if set(names) - predicted.keys() else done
    except PointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run_all(wanted: dict[str, dict[str, Any]], options: argparse.Namespace) -> int:
    """Run what has no row yet. Return 0 if all rows are there and within their budgets.

    Args:
        wanted: by name, the command, and what was predicted.
    """
    if options.output is None:
        raise PointError(f"{options.what}: --output FILE is missing")
    began = time.monotonic()
    old = json.loads(options.output.read_text()) if options.output.exists() else {}
    written: dict[str, Any] = {"date": now(), **facts(), **old}
    rows = written.setdefault("points", {})
    for name, one in wanted.items():
        if rows.get(name, {}).get("outcome") != "ok" and time.monotonic() - began < options.time_limit_s:
            rows[name] = run(one, options.limit_s)
            write_text(options.output, json.dumps(written, indent=1) + "\n")
            print(line(name, rows[name]), flush=True)
    done = [rows[name] for name in wanted if name in rows and rows[name]["outcome"] == "ok"]
    return 0 if len(done) == len(wanted) and all(row["is_within_budget"] for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())

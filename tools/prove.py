#!/usr/bin/env python3
"""Prove on a GPU what the README claims: equal results to the bit, and the cost of swapping.

    python tools/prove.py equality --spec transformer_engine local --output equality.jsonl
    python tools/prove.py overhead --case L16-h4096 --output overhead.jsonl
    python tools/prove.py ranks --case tp2-sp pp2-vpp dp2-distopt --output ranks.jsonl

Every run is a process of its own through the real trainer (pretrain_gpt_swap.py), one after the other in the order of
the rows that are written. A row says what was run, on what, and what came out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from prove_child import versions

ROOT = Path(__file__).resolve().parent.parent

COMMON = (
    "--bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --lr 1e-4 --min-lr 1e-5 "
    "--lr-decay-style constant --eval-iters 0 --eval-interval 100000 --log-interval 1 --no-masked-softmax-fusion "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --no-create-attention-mask-in-dataloader "
    "--distributed-timeout-minutes 5 --no-gradient-accumulation-fusion"
)
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
SHAPES = {
    "L16-h4096": f"--num-layers 16 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 "
    f"--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 {LLAMA}",
    "L4-h8192": f"--num-layers 4 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    f"--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
    f"--micro-batch-size 2 {LLAMA}",
    "L8-h1024": "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 2",
    "tiny": "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --swap-min-mib 0.001",
}
RANKS = {
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2-vpp": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    "dp2-distopt": "--use-distributed-optimizer",
}


def run(name: str, flags: str, *, num_ranks: int = 1, profile_step: int = 0, timeout_s: int = 400) -> dict[str, Any]:
    """One training run; returns its row (``outcome`` tells whether it worked)."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = ["--result", str(result), "--profile-step", str(profile_step), "--", *shlex.split(flags)]
        child = [str(ROOT / "tools" / "prove_child.py"), *command]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        if not torch.cuda.is_available():
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        environment = {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        }
        try:
            done = subprocess.run(
                [*launcher, *child],
                env=environment,
                timeout=timeout_s,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as expired:
            output, code = str(expired.stdout), 124
        row: dict[str, Any] = {"method": name, "flags": flags, "num_ranks": num_ranks, "outcome": "ok"}
        if code != 0 or not result.exists():
            row["outcome"] = "oom_device" if "OutOfMemoryError" in output else f"failed ({code})"
            own_words = output.split("torch/distributed/elastic", 1)[0]  # the launcher's own traceback says nothing
            row["output_tail"] = own_words[-3000:]
            print(own_words[-3000:], flush=True)
        else:
            row.update(json.loads(result.read_text()))
        step_ms, peak_gib = row.get("step_ms_median"), row.get("device_peak_gib")
        print(f"{name}: {row['outcome']}, step {step_ms} ms, peak {peak_gib} GiB", flush=True)
        return row


def equality(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Deterministic mode: unswapped twice, then swapped; losses, gradient norms, weights."""
    rows: list[dict[str, Any]] = []
    for spec in options.spec:
        flags = (
            f"{spec_flags(spec)} {SHAPES[options.case[0]]} {COMMON} {device_flags()} "
            f"--global-batch-size 8 --train-iters {options.steps} --swap-deterministic"
        )
        rows += compare(spec, flags, options, ["none", "none", "all"])
    return rows


def ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same on two ranks, for each way of splitting the model or the data."""
    rows: list[dict[str, Any]] = []
    for case in options.case:
        flags = (
            f"{spec_flags(options.spec[0])} {SHAPES[options.shape]} {COMMON} {device_flags()} {RANKS[case]} "
            f"--global-batch-size 16 --train-iters {options.steps} --swap-deterministic"
        )
        rows += compare(case, flags, options, ["none", "all"], num_ranks=2)
    return rows


def compare(
    case: str, flags: str, options: argparse.Namespace, settings: list[str], num_ranks: int = 1
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for layers in settings:
        row = run(f"swap-layers {layers}", f"{flags} --swap-layers {layers} {options.extra}", num_ranks=num_ranks)
        row["case"] = case
        for key in ("losses", "grad_norms", "weights_sha256"):
            row[f"{key}_equal"] = bool(row.get(key)) and row.get(key) == (rows or [row])[0].get(key)
        row["losses_equal"] = row["losses_equal"] and row["grad_norms_equal"] and row["weights_sha256_equal"]
        print(f"   {case}: equal to the first run: {row['losses_equal']}", flush=True)
        rows.append(row)
    return rows


def overhead(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Step times and peaks: nothing swapped, everything, and as much as forward hides."""
    rows: list[dict[str, Any]] = []
    link = link_gb_s()
    for case in options.case:
        num_layers = int(SHAPES[case].split("--num-layers ")[1].split()[0])
        batch = int(SHAPES[case].split("--micro-batch-size ")[1].split()[0])
        spec = options.spec[0]
        flags = (
            f"{spec_flags(spec)} {SHAPES[case]} {COMMON} {device_flags()} "
            f"--global-batch-size {batch * options.micro_batches} --train-iters {options.steps} {options.extra}"
        )
        none = run("none", f"{flags} --swap-layers none", profile_step=0)
        everything = run("all", f"{flags} --swap-layers all", profile_step=options.steps)
        mine = [none, everything]
        if none["outcome"] == everything["outcome"] == "ok":
            forward = none["forward_ms"] - none["first_layer_forward_ms"]
            layer_bytes = max(everything["layer_out_bytes"].values()) / options.micro_batches
            count = int(link["d2h_gb_s"] * 1e6 * forward / layer_bytes)
            count = min(count, num_layers - 1)
            mine.append(run("hidden", f"{flags} --swap-layers 0-{count - 1}", profile_step=options.steps))
            mine.append(run("none again", f"{flags} --swap-layers none", profile_step=0))
        for row in mine:
            row.update(case=f"{case} {spec}", link=link)
            if row["outcome"] == "ok" and none["outcome"] == "ok":
                judge(row, none, link, options.micro_batches)
        rows += mine
    return rows


def judge(row: dict[str, Any], none: dict[str, Any], link: dict[str, float], micro_batches: int) -> None:
    """The bounds: what the step may cost by the arithmetic of copies, and how far the peak must fall."""
    row["step_ratio"] = row["step_ms_median"] / none["step_ms_median"]
    if not row.get("trace_d2h_bytes"):
        return
    out_bytes, in_bytes = row["trace_d2h_bytes"] / micro_batches, row["trace_h2d_bytes"] / micro_batches
    first = none["first_layer_forward_ms"]
    rest = none["step_ms_median"] - micro_batches * (none["forward_ms"] + none["backward_ms"])
    model = first + max(none["forward_ms"] - first, out_bytes / link["d2h_gb_s"] / 1e6)
    model += max(none["backward_ms"], in_bytes / link["h2d_gb_s"] / 1e6)
    row["model_step_ms"] = model * micro_batches + rest
    row["step_to_model"] = row["step_ms_median"] / (1.05 * model * micro_batches + rest)
    group = max(row["layer_out_bytes"].values()) / micro_batches
    row["peak_fell_bytes"] = (none["device_peak_gib"] - row["device_peak_gib"]) * 2**30
    row["peak_must_fall_bytes"] = 0.97 * (out_bytes - 2 * group)  # window and largest group are one group each
    fell, must = row["peak_fell_bytes"] / 2**30, row["peak_must_fall_bytes"] / 2**30
    print(
        f"   {row['method']}: step x{row['step_ratio']:.4f}; {row['step_to_model']:.3f} of the bound; "
        f"peak fell {fell:.2f} GiB of {out_bytes / 2**30:.2f} swapped out (must: {must:.2f})",
        flush=True,
    )


def link_gb_s() -> dict[str, float]:
    """Bandwidth of pinned copies, one direction at a time, in a process of its own."""
    import torch

    if not torch.cuda.is_available():
        return {"d2h_gb_s": 1.0, "h2d_gb_s": 1.0}
    code = """
import json, torch
host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True); device = torch.empty_like(host, device="cuda")
speed = {}
for name, target, source in (("d2h_gb_s", host, device), ("h2d_gb_s", device, host)):
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(); target.copy_(source, non_blocking=True); end.record(); end.synchronize()
        times.append(start.elapsed_time(end))
    speed[name] = host.numel() / sorted(times)[len(times) // 2] / 1e6
print(json.dumps(speed))
"""
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def spec_flags(spec: str) -> str:
    return f"--transformer-impl {spec} " + ("--no-persist-layer-norm" if spec == "local" else "")


def device_flags() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    fusions = ("bias-gelu", "bias-dropout", "bias-swiglu", "rope")
    return "--distributed-backend gloo " + " ".join(f"--no-{name}-fusion" for name in fusions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equality", "overhead", "ranks"])
    parser.add_argument("--case", nargs="+", help="shapes (equality: one; overhead), or ways to split (ranks)")
    parser.add_argument("--shape", default="L8-h1024", choices=SHAPES, help="ranks: the model")
    parser.add_argument("--spec", nargs="+", default=["transformer_engine"], help="layer specs")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=4, help="overhead: micro-batches a step")
    parser.add_argument("--extra", default="", help="more flags for every run")
    parser.add_argument("--output", required=True, help="JSON lines, one row a run; appended")
    options = parser.parse_args()
    usual = {"equality": ["L8-h1024"], "overhead": ["L16-h4096"], "ranks": list(RANKS)}
    options.case = options.case or usual[options.what]
    rows = {"equality": equality, "overhead": overhead, "ranks": ranks}[options.what](options)
    command = shlex.join(["python", "tools/prove.py", *sys.argv[1:]])
    made_by = {"suite": f"prove-{options.what}", "command": command, **versions()}
    with Path(options.output).open("a") as file:
        for row in rows:
            file.write(json.dumps({**made_by, **row}) + "\n")
    if any(row["outcome"] != "ok" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Verify the README's statements on a GPU: bit-identical results, and the cost of swapping.

    python tools/verify.py equality --spec transformer_engine local --output equality.jsonl
    python tools/verify.py overhead --case L16-h4096 --output overhead.jsonl
    python tools/verify.py ranks --case tp2-sp pp2-vpp dp2-distopt --output ranks.jsonl
    python tools/verify.py ranks --case tp2-sp-pp2 cp2-dp2 --budget-share 0.9 --output four-ranks.jsonl
    python tools/verify.py equality --case L32-h2048 --extra "--micro-batch-size 23 --global-batch-size 23" --settings \
        "--swap-layers none --swap-oom-guard" "--swap-memory-gib 130 --swap-oom-guard" --held-gib 16 --output out.jsonl

Every run is a separate process of the real trainer (pretrain_gpt_swap.py), in the order of the rows. A row holds the
command, the machine and the results.
"""

import argparse
import math
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.rows import COMPLETE, GIB, NOT_STABLE, UNPLANNED, Row
from benchmarks.runner import launch
from benchmarks.runner.memory_hog import memory_hog
from benchmarks.runner.program import ChoiceError, guarded, new_parser
from benchmarks.runner.request import Request
from benchmarks.store import ResultStore, locked

NUM_WARM_UP = 3

DEFINITIONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MOE: str = DEFINITIONS["moe"]
SHAPES: dict[str, str] = DEFINITIONS["shapes"]
RANKS = {case: (num_ranks, split.replace("{moe}", MOE)) for case, (num_ranks, split) in DEFINITIONS["ranks"].items()}
SUMMARY_FIELDS = (
    "swapped_out_bytes", "swapped_in_bytes", "swapped_layers", "wait_ms", "num_late", "stayed_bytes", "losses",
    "grad_norms", "num_rescues", "rescued_bytes", "short_bytes",
)  # fmt: skip
SETTINGS = (
    "--swap-layers none", "--swap-layers all",
    "--swap-layers 0-3 --swap-recompute norm activation rotary linear --swap-verify",
)  # fmt: skip
NULL_WHERE_FAILED = (
    "step_ms_median", "step_ms_all", "first_step_ms", "device_peak_gib", "device_static_gib", "device_reserved_gib",
    "host_peak_gib", "tokens_per_s", "num_params", "loss_hex", "losses_equal",
)  # fmt: skip
USUAL = {"equality": ["L8-h1024"], "overhead": ["L16-h4096"], "ranks": ["tp2-sp", "pp2", "pp2-vpp", "dp2-distopt"]}
"""The cases of each kind of comparison without ``--case``."""
NOTHING, EVERYTHING = "--swap-layers none", "--swap-layers all"


class Verifier:
    def __init__(self, options: argparse.Namespace, facts: dict[str, Any]) -> None:
        self.options = options
        self.on_gpu = facts["machine"]["gpu"] != "none"
        self.link: dict[str, float] = facts["link"]

    def flags(self, spec: str, shape: str, more: str) -> str:
        fusions = ("bias-gelu", "bias-dropout", "bias-swiglu", "rope")
        on_cpu = "--distributed-backend gloo " + " ".join(f"--no-{name}-fusion" for name in fusions)
        norm = "--no-persist-layer-norm " if spec == "local" else ""
        device = "" if self.on_gpu else f"{on_cpu} "
        steps = f"--train-iters {self.options.steps}"
        return f"--transformer-impl {spec} {norm}{SHAPES[shape]} {DEFINITIONS['common']} {device}{more} {steps}"

    def run(self, name: str, flags: str, *, num_ranks: int = 1, timeout_s: int = 400) -> Row:
        request = Request(tuple(shlex.split(flags)), num_warm_up=NUM_WARM_UP, has_phases=True, has_summary=True)
        finished = launch.run(request, on_gpu=self.on_gpu, num_ranks=num_ranks, timeout_s=timeout_s)
        row: Row = {"method": name, "flags": flags, "num_ranks": num_ranks, "outcome": finished.outcome}
        if finished.outcome == "ok":
            row.update(measured(finished.result))
            if row["step_ms_median"] is None:
                row["outcome"] = NOT_STABLE
        else:
            row.update(dict.fromkeys(NULL_WHERE_FAILED), output_tail=finished.output_tail)
            print(finished.output_tail, flush=True)
        step_ms, peak_gib = row["step_ms_median"], row["device_peak_gib"]
        print(f"{name}: {row['outcome']}, step {step_ms} ms, peak {peak_gib} GiB", flush=True)
        return row


def measured(result: dict[str, Any]) -> Row:
    summary = result.pop("summary")
    planning = result.pop("planning") or {}
    return {
        **result,
        **{field: planning[field] for field in UNPLANNED if field in planning},
        # A run that searches for its plan may end before the plan is stable: then no step was timed.
        "tokens_per_s": result["tokens_per_step"] / step_ms * 1e3 if (step_ms := result["step_ms_median"]) else None,
        "device_peak_gib": None if summary["device_peak_bytes"] is None else summary["device_peak_bytes"] / GIB,
        "host_leased_gib": summary["host_leased_peak_bytes"] / GIB,
        "host_booked_gib": summary["host_booked_bytes"] / GIB,
        "saved_peak_gib": (summary["saved_peak_bytes"] or 0) / GIB,
        "layer_out_bytes": {str(entry["layer"]): entry["swapped_out_bytes"] for entry in summary["layers"]},
        "loss_hex": summary["losses"][-1],
        "rescues_by_step": [step["num_rescues"] for step in summary["steps"]],
        **{key: summary[key] for key in SUMMARY_FIELDS},
    }


def equality(verifier: Verifier) -> Iterator[Row]:
    """Compare losses, gradient norms and weights in deterministic mode: unswapped, then with each of the settings."""
    options = verifier.options
    settings = SETTINGS if options.settings is None else options.settings
    for spec in options.spec:
        flags = verifier.flags(spec, options.case[0], "--global-batch-size 8 --swap-deterministic")
        yield from compare(verifier, spec, flags, [NOTHING, *settings])


def ranks(verifier: Verifier) -> Iterator[Row]:
    options = verifier.options
    settings = [EVERYTHING] if options.settings is None else options.settings
    for case in options.case:
        num_ranks, split = RANKS[case]
        more = f"{split} --global-batch-size 16 --swap-deterministic"
        flags = verifier.flags(options.spec[0], options.shape, more)
        yield from compare(verifier, case, flags, [NOTHING, *settings], num_ranks)


def compare(verifier: Verifier, case: str, flags: str, settings: list[str], num_ranks: int = 1) -> Iterator[Row]:
    """Train with each of the settings (our flags) and compare with the first completed run."""
    options = verifier.options
    first: Row | None = None
    for setting in [*settings, *([None] if options.budget_share is not None else [])]:
        if setting is None:
            if first is None:
                print(f"   {case}: not planned, as no run says how much memory it needs", flush=True)
                break
            # Without a GPU, a budget is for the bytes that autograd holds.
            used_gib = first["device_reserved_gib"] or first["saved_peak_gib"]
            setting = f"--swap-optimizer auto --swap-memory-gib {options.budget_share * used_gib:.6f}"
        given = f"{flags} {setting} {options.extra}"
        row = verifier.run(setting.removeprefix("--"), given, num_ranks=num_ranks)
        row["case"] = case
        if first is None and row["outcome"] == "ok":
            first = row
        for key in ("losses", "grad_norms", "weights_sha256"):
            row[f"{key}_equal"] = bool(row.get(key)) and row.get(key) == (first or row).get(key)
        row["losses_equal"] = row["losses_equal"] and row["grad_norms_equal"] and row["weights_sha256_equal"]
        if row["outcome"] in COMPLETE:
            print(f"   {case}: equal to the first run: {row['losses_equal']}", flush=True)
        yield row


def overhead(verifier: Verifier) -> Iterator[Row]:
    options, link = verifier.options, verifier.link
    if not verifier.on_gpu:
        raise ChoiceError("overhead needs a GPU: step times of the emulation mean nothing")
    for case in options.case:
        words = SHAPES[case].split()
        num_layers, batch = (int(words[words.index(flag) + 1]) for flag in ("--num-layers", "--micro-batch-size"))
        more = f"--global-batch-size {batch * options.micro_batches} {options.extra}"
        flags = verifier.flags(options.spec[0], case, more)
        none, everything = verifier.run("none", f"{flags} {NOTHING}"), verifier.run("all", f"{flags} {EVERYTHING}")
        mine = [none, everything]
        if none["outcome"] == everything["outcome"] == "ok":
            forward_ms = none["forward_ms"] - none["first_layer_forward_ms"]
            layer_bytes = max(everything["layer_out_bytes"].values()) / options.micro_batches
            count = min(int(link["d2h_gb_s"] * 1e6 * forward_ms / layer_bytes), num_layers - 1)
            mine.append(verifier.run("hidden", f"{flags} --swap-layers 0-{count - 1}"))
            mine.append(verifier.run("none again", f"{flags} {NOTHING}"))
        for row in mine:
            equal = row["losses"] == none["losses"] if "losses" in row and "losses" in none else None
            row |= {"case": f"{case} {options.spec[0]}", "link": link, "losses_equal": equal}
            if row["outcome"] == none["outcome"] == "ok":
                fell_gib = none["device_peak_gib"] - row["device_peak_gib"]
                print(f"   {row['method']}: step x{row['step_ms_median'] / none['step_ms_median']:.4f}; "
                      f"peak fell {fell_gib:.2f} GiB", flush=True)  # fmt: skip
        yield from mine


def verify(options: argparse.Namespace, command: str) -> int:
    store = ResultStore(options.output, resume=True)  # first: a file without rows is refused before measuring
    num_earlier = len(store.rows)
    facts = machine.facts()
    if len(options.held_gib) > (num_gpus := facts["machine"]["num_gpus"]):
        raise ChoiceError(f"--held-gib has {len(options.held_gib)} figures, there are {num_gpus} GPUs")
    if facts["machine"]["gpu"] == "none" and options.what != "overhead" and "transformer_engine" in options.spec:
        small = "--case tiny" if options.what == "equality" else "--shape tiny"
        raise ChoiceError(
            f"{options.what} with --spec transformer_engine, the default, needs a GPU, and there is none. The "
            f"emulation runs --spec local {small}"
        )
    made_by = {"suite": f"prove-{options.what}", "command": command, "held_gib": options.held_gib, **facts}
    compared = {"equality": equality, "overhead": overhead, "ranks": ranks}[options.what]
    with memory_hog(options.held_gib):
        for row in compared(Verifier(options, facts)):
            store.append({**UNPLANNED, **made_by, "date": machine.now(), **row})
    made = store.rows[num_earlier:]
    differs = options.what != "overhead" and any(row["losses_equal"] is False for row in made)
    return int(differs or any(row["outcome"] not in COMPLETE for row in made))


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("what", choices=USUAL)
    add("--case", nargs="+", help="shapes (equality: one; overhead), or ways to split (ranks; default: dense layers "
        "on two ranks)")  # fmt: skip
    add("--shape", default="L8-h1024", choices=SHAPES, help="ranks: the model")
    add("--spec", nargs="+", default=["transformer_engine"], help="layer specs")
    add("--steps", type=int, default=20)
    add("--micro-batches", type=int, default=4, help="overhead: micro-batches a step")
    add("--settings", nargs="*", help="equality, ranks: flags of each run that is compared with the unswapped one")
    add("--budget-share", type=float, help="equality, ranks: also a planned run, with this share of the memory that "
        "the unswapped run reserved")  # fmt: skip
    add("--extra", default="", help="more flags for every run")
    add("--held-gib", nargs="+", type=float, default=[], help="GiB that another program holds meanwhile on the first "
        "GPU, the second, ...")  # fmt: skip
    add("--output", required=True, type=Path, help="JSON lines, one row per run; appended")
    options = parser.parse_args(arguments)
    if options.steps < (least := NUM_WARM_UP + 1):
        parser.error(f"--steps {options.steps}: {NUM_WARM_UP} are warm-up; at least {least}")
    if options.budget_share is not None and not 0 < options.budget_share <= 1:
        parser.error(f"--budget-share {options.budget_share:g}: must be above 0 and at most 1")
    if not all(0 <= gib < math.inf for gib in options.held_gib):
        parser.error(f"--held-gib {' '.join(map(str, options.held_gib))}: must be numbers of GiB, 0 or more")
    options.case = options.case or USUAL[options.what]
    command = shlex.join(["python", "tools/verify.py", *arguments])

    def locked_verify() -> int:
        with locked(options.output):
            return verify(options, command)

    return guarded(locked_verify)

"""Say whether a training run fits a GPU, by which flags, and how fast it will be: on any machine, without the GPU.

    megatron-swap plan --gpu h100 -- --num-layers 32 --hidden-size 4096 … your training flags
    megatron-swap plan --gpu h100 --gpus-per-host 8 --host-gib 1000 -- … your training flags
    megatron-swap plan --gpu custom:79.1,989,63 --memory-gib 70 --save plan.json -- … your training flags
    megatron-swap plan --profile profile.json --memory-gib 24 --link-gb-s 12 --seq-length 8192 --curve curve.png
    megatron-swap plan --show plan.json

Prints a verdict, the training command, speed and peak memory, and a table: nothing, full recomputation, a plan, a plan
with offloaded optimizer state, and with a disk beside it. --table adds what is kept, swapped and recomputed, and the
memory of weights, gradients, optimizer state and activations on each tier. With --summary run.json the memory that a
run measured (--swap-summary) is printed beside the prediction.

--swap-memory-gib, --swap-optimizer, --swap-host-gib and --swap-disk-dir among the training flags limit the plan as they
limit training. A profile comes from training (--swap-save-profile) or from training flags (--save-profile). Exit
status: 0, or 1 if nothing fits or an input is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.swap.cli.training_command import training_command
from megatron.swap.common.command_line import CommandLine
from megatron.swap.common.config import USUAL_FRACTION, check_files
from megatron.swap.common.plan import Model, load_plan, save_plan
from megatron.swap.common.records import from_json, read_text
from megatron.swap.common.types import GIB, MOST, MemoryRow, UsageError, format_bytes
from megatron.swap.planner.flags import Training, check_known, not_counted, read_flags, training_flags
from megatron.swap.planner.gpus import CUSTOM_SYNTAX, GPUS, MAX_PER_HOST, Gpu, find_gpu
from megatron.swap.planner.options import DISK, STATE, Option, best, of_profile, of_training
from megatron.swap.planner.profile import Profile, load_profile, save_profile
from megatron.swap.planner.shape import params_of_rank
from megatron.swap.planner.solve import Solution, curve
from megatron.swap.planner.table import (
    memory_table,
    non_layer_table,
    options_table,
    plan_heading,
    plan_table,
    prediction_text,
)
from megatron.swap.planner.what_if import with_link, with_tokens

WITH_GPU = ("num_gpus", "gpus_per_host", "pipeline_rank", "summary", "flags")
"""Options that need --gpu."""
DISK_NOTE = "The disk's speed is not known: 1.2 GB/s written and 2.2 read are assumed."


class _PlanLine(CommandLine):
    """The options of plan. A training flag among them has lost its ``--``."""

    def unknown(self, words: list[str]) -> str:
        lost = next((name for word in words if (name := word.partition("=")[0]) in training_flags()), None)
        if lost is None:
            return super().unknown(words)
        return f"{lost} is a training flag. Training flags go behind --, as in `{self.prog} --gpu h100 -- {lost} …`."


def main(arguments: list[str] | None = None) -> int:
    """Plan, print and write the files that the options name. Return the exit status.

    Args:
        arguments: the command line after the program's name; `None`: that of this process.
    """
    parser = _PlanLine(
        prog="megatron-swap plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--profile", type=Path, help="a measured profile")
    source.add_argument("--show", type=Path, metavar="PLAN", help="print this plan file and plan nothing")
    source.add_argument("--gpu", help=f"plan from the training flags after --, for one of {', '.join(GPUS)}, "
                        f"or for {CUSTOM_SYNTAX}: GiB of memory, dense bf16 TFLOP/s of its data sheet, GB/s of its "
                        "link in one direction")  # fmt: skip
    parser.add_argument("--memory-gib", type=float,
                        help=f"device memory that a step may reserve; default: {USUAL_FRACTION:g} of the device, as in "
                        "training: CUDA, NCCL and fragments need the rest")  # fmt: skip
    parser.add_argument("--host-gib", type=float, help="pinned host memory, shared by the GPUs of a host")
    parser.add_argument("--table", action="store_true",
                        help="print the action for every saved tensor, and memory by kind and tier")  # fmt: skip
    parser.add_argument("--save", type=Path, help="write the plan here")
    parser.add_argument("--save-profile", type=Path, help="write the profile of this plan here")
    parser.add_argument("--curve", type=Path, help="draw step time against memory into this image file")
    parser.add_argument("--link-gb-s", type=float, help="assume copies at this speed, in each direction")
    parser.add_argument("--seq-length", type=int, help="assume this sequence length")
    parser.add_argument("--micro-batch-size", type=int, help="assume this micro-batch size")
    parser.add_argument("--num-gpus", type=int, help="with --gpu: number of GPUs; default: one model replica")
    parser.add_argument("--gpus-per-host", type=int,
                        help="with --gpu: GPUs that share a host's memory and link; default: all GPUs of the run, at "
                        f"most {MAX_PER_HOST}")  # fmt: skip
    parser.add_argument("--pipeline-rank", type=int, help="with --gpu: stage to plan; default: 0")
    parser.add_argument("--summary", type=Path, help="with --gpu: --swap-summary file to print beside the prediction")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="with --gpu: the training command's flags")
    options = parser.parse_args(arguments)
    own = [name for action in parser._actions for name in action.option_strings]
    try:
        check(options)
        return 0 if plan(options, own) else 1
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def check(options: argparse.Namespace) -> None:
    """Refuse options without effect, numbers out of range and files that cannot be written, before planning.

    Raises:
        UsageError: names the option and the remedy.
    """
    source = next(name for name in ("show", "profile", "gpu") if getattr(options, name) is not None)
    ignored = {"show": vars(options).keys() - {"show"}, "profile": WITH_GPU, "gpu": ()}[source]
    for name, given in vars(options).items():
        if name in ignored and given is not False and given not in (None, []):
            what = given[0] if name == "flags" else f"{_flag(name)} {given}"
            why = "prints a plan file and plans nothing" if source == "show" else "knows its model and its stage"
            raise UsageError(f"{what}: does not go with --{source}, which {why}. Leave it out, or plan with --gpu.")
    if options.gpus_per_host is not None and not 1 <= options.gpus_per_host <= MOST:
        raise UsageError(f"--gpus-per-host {options.gpus_per_host}: must be at least 1.")
    for name, least in (("memory_gib", "above 0"), ("link_gb_s", "above 0"), ("host_gib", "0 or more")):
        given = getattr(options, name)
        if given is not None and not (0 <= given <= MOST and (given or name == "host_gib")):
            raise UsageError(f"{_flag(name)} {given:g}: must be a number {least}, at most {MOST:g}.")
    if options.curve is not None:
        check_picture(options.curve)
    written = {"--save": options.save, "--save-profile": options.save_profile, "--curve": options.curve}
    check_files(written, {"--profile": options.profile, "--summary": options.summary})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def plan(options: argparse.Namespace, own: Collection[str] = ()) -> bool:
    """Print a plan file; or make a plan, print it with its predictions, and write the files that the options name.

    Args:
        own: the names of all options, which are no training flags.

    Returns:
        whether something fits.

    Raises:
        UsageError: a flag or file is invalid.
        OSError: a file cannot be read or written.
    """
    if options.show is not None:
        shown = load_plan(options.show)
        print(plan_heading(shown), plan_table(shown), sep="\n\n")
        return True
    if options.gpu is None:
        return _plan_profile(options)
    check_known(options.flags, own)
    return _plan_training(options, read_flags(options.flags, options.num_gpus))


def _plan_training(options: argparse.Namespace, training: Training) -> bool:
    """Plan a run from its flags. Return whether something fits."""
    sizes = {name: getattr(options, name) for name in ("seq_length", "micro_batch_size")}
    given = {name: size for name, size in sizes.items() if size is not None}
    training = replace(training, model=replace(training.model, **given))
    per_host = options.gpus_per_host or min(training.num_gpus, MAX_PER_HOST)
    if training.num_gpus > per_host and training.num_gpus % per_host:
        raise UsageError(f"--gpus-per-host {per_host}: must divide the {training.num_gpus} GPUs of the run.")
    gpu = find_gpu(options.gpu).beside(per_host)
    budget_gib = _budget_gib(options, training.budget_gib, gpu.memory_gib)
    if budget_gib > gpu.memory_gib:
        raise UsageError(f"--memory-gib {budget_gib:g}: {gpu.name} has {gpu.memory_gib:g} GiB.")
    rank = options.pipeline_rank or 0
    if not 0 <= rank < training.model.pipeline_parallel:
        raise UsageError(f"--pipeline-rank {rank}: must be 0 to {training.model.pipeline_parallel - 1}.")
    host_gib = training.host_gib if options.host_gib is None else options.host_gib / per_host
    _check_host(options, training, host_gib, rank)
    measured = () if options.summary is None else read_measured(options.summary, training.model, rank)
    found = of_training(training, gpu, budget_gib, host_gib, rank, _disk_dir(options.flags), options.link_gb_s)
    wanted = _wanted(found, training, is_saved=options.save is not None)
    chosen = best(wanted, is_disk_given=training.disk_gib > 0)
    on = f"in {budget_gib:.4g} of the {gpu.memory_gib:g} GiB of {gpu.name}"
    budget = ["--swap-plan", str(options.save)] if options.save else ["--swap-memory-gib", _floor(budget_gib)]
    flags: list[str] = []
    if chosen is None:
        print(f"Does not fit {on}. {_advice(found, training, budget_gib, rank)}", end="\n\n")
    else:
        flags = [*(budget if chosen.is_planned else ()), *chosen.flags]
        if chosen.is_planned and host_gib is not None:
            flags += ["--swap-host-gib", _floor(host_gib)]
        print(_verdict(chosen, found[0], on, flags, training.num_gpus, training.disk_gib > 0), end="\n\n")
        print(training_command(options.flags, flags, training.num_gpus, per_host), end="\n\n")
        print(prediction_text(chosen, found[0], training.tokens), end="\n\n")
    print(options_table(found, training.tokens))
    if chosen is not None and chosen.disk_gib:
        print(f"\n{DISK_NOTE}")
    for note in _notes(options, training, gpu, per_host):
        print(f"\n{note}")
    if chosen is None:
        return False
    if options.table or measured:
        states, has_disk = chosen.states, chosen.name == DISK or training.disk_gib > 0
        before_disk_gib = None if not has_disk else math.inf if host_gib is None else host_gib
        assert states is not None
        assert chosen.prediction is not None
        params = params_of_rank(training.model, training.tied, rank)
        profile, prediction = chosen.predicted_profile, replace(chosen.prediction, peak_gib=chosen.device_gib)
        _print_tables(options, chosen)
        print(f"\n{memory_table(states, params, profile, prediction, before_disk_gib, measured)}")
    _write(options, chosen, found[0])
    return True


def _plan_profile(options: argparse.Namespace) -> bool:
    """Plan a run from its profile. Return whether something fits."""
    profile = load_profile(options.profile)
    if options.host_gib is not None:
        profile = replace(profile, host_gib=options.host_gib)
    if options.link_gb_s is not None:
        profile = with_link(profile, options.link_gb_s)
    if options.seq_length is not None or options.micro_batch_size is not None:
        profile = with_tokens(profile, options.seq_length, options.micro_batch_size)
    budget_gib = _budget_gib(options, None, profile.device.memory_gib)
    model = profile.model
    tokens = model.seq_length * model.micro_batch_size * profile.num_micro_batches
    found = of_profile(profile, budget_gib)
    chosen = found[-1]
    if chosen.fits:
        budget = f"--swap-plan {options.save}" if options.save else f"--swap-memory-gib {_floor(budget_gib)}"
        print(_verdict(chosen, found[0], f"in {budget_gib:.4g} GiB of {profile.device.name}", (budget, *chosen.flags)))
        print(f"\n{prediction_text(chosen, found[0], tokens)}\n")
    else:
        print(f"Does not fit in {budget_gib:.4g} GiB of {profile.device.name}. The smallest budget that was found "
              f"feasible is {chosen.device_gib:g} GiB.\n")  # fmt: skip
    print(options_table(found, tokens))
    if not chosen.fits:
        return False
    if options.table:
        _print_tables(options, chosen)
    _write(options, chosen, found[0])
    return True


def _print_tables(options: argparse.Namespace, chosen: Option) -> None:
    if options.table:
        tables = plan_table(chosen.solution.plan) if chosen.solution else "", non_layer_table(chosen.profile)
        for table in filter(None, tables):
            print(f"\n{table}")


def _write(options: argparse.Namespace, chosen: Option, unswapped: Option) -> None:
    if options.save and chosen.solution is not None:
        save_plan(chosen.solution.plan, options.save)
    if options.save_profile:
        save_profile(chosen.profile, options.save_profile)
    if options.curve:
        draw(curve(chosen.profile), unswapped, chosen.profile, options.curve)


def _budget_gib(options: argparse.Namespace, given_gib: float | None, device_gib: float) -> float:
    """Return the budget from --memory-gib, else from the training flags, else the one that training takes."""
    asked: float | None = given_gib if options.memory_gib is None else options.memory_gib
    return USUAL_FRACTION * device_gib if asked is None else asked


def _floor(gib: float) -> str:
    """Format GiB for a flag: rounded down to two decimals, or as it is if it is small."""
    return f"{math.floor(100 * gib) / 100:g}" if gib >= 1 else f"{gib:.10g}"


def _wanted(found: Sequence[Option], training: Training, is_saved: bool) -> list[Option]:
    """Return the options to choose from: those that can be saved as a plan, and that do what the flags ask for."""
    if training.offloads:
        return [one for one in found if one.name == DISK or (one.name == STATE and not training.disk_gib)]
    return [one for one in found if one.is_planned] if is_saved else list(found)


def _verdict(
    chosen: Option, unswapped: Option, on: str, flags: Sequence[str], num_gpus: int = 1, is_disk_given: bool = True
) -> str:
    """Return what fits: its step time, its memory besides the device's, and its flags."""
    if not flags:
        return f"Fits {on}, as it is: nothing needs to be swapped or recomputed."
    assert chosen.prediction is not None
    assert unswapped.prediction is not None
    times = chosen.prediction.step_ms / unswapped.prediction.step_ms
    tiers = [f"{format_bytes(gib * GIB)} of {what}"
             for gib, what in ((chosen.host_gib, "host memory"), (chosen.disk_gib, "disk")) if gib]  # fmt: skip
    only = " only with a disk," if chosen.disk_gib and not is_disk_given else ""
    each = " for each GPU" if num_gpus > 1 else ""
    beside = f", with {' and '.join(tiers)}{each}" if tiers else ""
    return f"Fits {on}{only} at {times:.2f} x the unswapped step time{beside}: {' '.join(flags)}"


def _disk_dir(flags: Sequence[str]) -> str:
    """Return the folder of --swap-disk-dir among the training flags, or one that every machine has."""
    words = [part for word in flags for part in word.split("=", 1)]
    return words[words.index("--swap-disk-dir") + 1] if "--swap-disk-dir" in words[:-1] else "/tmp"


def _advice(found: Sequence[Option], training: Training, budget_gib: float, rank: int) -> str:
    """Return the smallest budget of all options with its flags, and changes that lower it."""
    least = min(found, key=lambda one: one.needed_gib)
    flags = " and ".join((*(("a plan",) if least.is_planned else ()), *filter(None, (" ".join(least.flags),))))
    model = training.model
    params = params_of_rank(model, training.tied, rank)
    least_gib = training.states.weights_gib(params) + training.states.gradients_gib(params)
    split = f"--tensor-model-parallel-size {2 * model.tensor_parallel}"
    if least_gib > budget_gib:  # no shorter step can help
        hints, alone = [split], f"Weights and gradients alone take {least_gib:.1f} GiB. "
        if training.states.gradient_bytes == 4 and model.dtype == "bf16":
            hints.append("16-bit gradients (--main-grads-dtype bf16 --use-precision-aware-optimizer "
                         "--use-distributed-optimizer)")  # fmt: skip
    else:
        shorter = "a smaller --micro-batch-size" if model.micro_batch_size > 1 else "a shorter --seq-length"
        hints, alone = [shorter, split], ""
    if training.num_replicas * model.context_parallel > 1 and training.states.num_shards == 1:
        hints.append("--use-distributed-optimizer")
    if training.offloads and not training.states.is_auto and training.states.offload_fraction < 1:
        hints.insert(0, "--swap-optimizer auto")
    return (
        f"The least is {least.needed_gib:g} GiB, with {flags or 'nothing'}. {alone}Lower it by {', '.join(hints)}, "
        "or take a GPU with more memory."
    )


def _check_host(options: argparse.Namespace, training: Training, host_gib: float | None, rank: int) -> None:
    """Refuse a given fraction of optimizer state that exceeds the rank's host memory."""
    offloaded_gib = training.states.offloaded_gib(params_of_rank(training.model, training.tied, rank))
    if host_gib is None or training.disk_gib or training.states.is_auto or offloaded_gib <= host_gib:
        return
    given = f"--host-gib {options.host_gib:g}" if options.host_gib is not None else f"--swap-host-gib {host_gib:g}"
    raise UsageError(
        f"{given}: the offloaded optimizer state takes {offloaded_gib:.2f} GiB. Lower --swap-optimizer among the "
        "training flags, or add --swap-disk-dir to them."
    )


def _notes(options: argparse.Namespace, training: Training, gpu: Gpu, per_host: int) -> Iterator[str]:
    if per_host > 1:
        if options.link_gb_s is not None:
            gpu = replace(gpu, link_gb_s=options.link_gb_s, link_both_gb_s=options.link_gb_s)
        link = f"{gpu.link_gb_s:g} GB/s in one direction, {gpu.link_both_gb_s:g} in each of both"
        shared = f"{per_host} GPUs of a host share its memory and its link: each copies at {link}"
        yield f"{shared}, as measured on an H200 host." if options.link_gb_s is None else f"{shared}, as given."
    if options.host_gib is None and training.host_gib is None:
        yield "Host memory is taken for unlimited: --host-gib says how much of it a host can pin."
    if uncounted := not_counted(options.flags):
        yield f"Not counted, though they change memory: {', '.join(uncounted)}."


def read_measured(path: Path, model: Model, pipeline_rank: int) -> tuple[MemoryRow, ...]:
    """Return the memory of the planned stage's first rank from a run's summary.

    Raises:
        UsageError: the file is no summary, or its run has another number of layers.
    """
    try:
        summary = json.loads(read_text(path))
        num_layers, ranks = summary["num_layers"], summary["ranks"]
        rank = ranks[pipeline_rank * len(ranks) // model.pipeline_parallel]
        rows = rank["memory"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"--summary {path}: is not what --swap-summary writes today ({type(error).__name__}: {error}). Train again "
            "with it, or leave --summary out."
        ) from error
    if num_layers != model.num_layers:
        raise UsageError(
            f"--summary {path}: is of {num_layers} layers, the training flags say {model.num_layers}. Give the "
            "flags of that run."
        )
    return from_json(tuple[MemoryRow, ...], rows, f"--summary {path}: memory")


def check_picture(path: Path) -> None:
    """Refuse an image file that cannot be drawn.

    Raises:
        UsageError: matplotlib is missing, or the file name has no extension of an image format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise UsageError(
            f"--curve {path}: matplotlib is missing. Install it (pip install matplotlib), or leave --curve out."
        ) from error
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise UsageError(f"--curve {path}: must be a picture; its name ends in .{', .'.join(kinds)}.")


def draw(points: list[Solution], unswapped: Option, profile: Profile, path: Path) -> None:
    """Draw step time, relative to nothing swapped, against device memory in GiB."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=130, layout="constrained")
    assert unswapped.prediction is not None
    unswapped_ms = unswapped.prediction.step_ms
    budgets = [point.plan.budget_gib or 0.0 for point in points]
    relative = [point.prediction.step_ms / unswapped_ms for point in points]
    bounds = [point.lower_bound_ms / unswapped_ms for point in points]
    axes.step(budgets, relative, where="post", color="#c2410c", label="fastest plan found")
    axes.plot(budgets, bounds, color="#94a3b8", linestyle="--", label="lower bound of all plans")
    axes.plot(unswapped.device_gib, 1.0, "o", color="#1e293b", label="nothing swapped")
    axes.axvline(profile.static_gib, color="#475569", linewidth=0.8)
    axes.annotate(
        "weights, gradients, optimizer", (profile.static_gib, 1.0), (6, 0), textcoords="offset points",
        color="#475569", rotation=90, va="bottom",
    )  # fmt: skip
    axes.set_xlabel("device memory (GiB)")
    axes.set_ylabel("step time relative to nothing swapped")
    axes.set_title(f"{profile.device.name}, {profile.model.num_layers} layers of {profile.model.hidden_size}, "
                   f"sequences of {profile.model.seq_length}")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())

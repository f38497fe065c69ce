"""Plan what to keep, swap and recompute, on any machine, from a profile or from a model's shape alone.

    megatron-swap plan --profile profile.json --memory-gib 24 --save plan.json
    megatron-swap plan --profile profile.json --memory-gib 24 --link-gb-s 12 --seq-length 8192 --curve curve.png
    megatron-swap plan --show plan.json
    megatron-swap plan --gpu h200 --memory-gib 80 -- --num-layers 32 --hidden-size 4096 … your training flags

Prints the actions for each class of layers, the predicted peak and step time, and a lower bound of the step time.

With --gpu it also prints the memory of weights, gradients, optimizer state and activations on the device, in host
memory and on disk. Among the training flags, --swap-optimizer offloads a fraction of the optimizer state to host
memory, and --swap-disk-dir adds a disk for bytes that exceed host memory. With --summary run.json the memory that a run
measured (--swap-summary) is printed beside the prediction.

A profile comes from training (--swap-save-profile) or from a model's shape (--save-profile). Exit status: 0, or 1 if no
plan fits or a file is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

from megatron.swap.common.command_line import CommandLine
from megatron.swap.common.config import check_files
from megatron.swap.common.plan import load_plan, save_plan
from megatron.swap.common.records import from_json, read_text
from megatron.swap.common.types import MOST, MemoryRow, UsageError
from megatron.swap.planner.flags import Training, check_known, read_flags
from megatron.swap.planner.gpus import GPUS, find_gpu
from megatron.swap.planner.profile import Profile, load_profile, save_profile
from megatron.swap.planner.shape import params_of_rank, shape_profile
from megatron.swap.planner.simulate import Prediction, simulate
from megatron.swap.planner.solve import Solution, curve, empty_plan
from megatron.swap.planner.state_fraction import solve_fractions, with_fraction
from megatron.swap.planner.states import max_offloaded_state_gib
from megatron.swap.planner.table import memory_table, non_layer_table, plan_heading, plan_table, prediction_text
from megatron.swap.planner.what_if import with_link, with_tokens

WITH_GPU = ("num_gpus", "pipeline_rank", "summary", "flags")
"""Options that need --gpu."""


def main(arguments: list[str] | None = None) -> int:
    """Plan, print and write the files that the options name. Return the exit status.

    Args:
        arguments: the command line after the program's name; `None`: that of this process.
    """
    parser = CommandLine(
        prog="megatron-swap plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--profile", type=Path, help="a measured profile")
    source.add_argument("--show", type=Path, metavar="PLAN", help="print this plan file and plan nothing")
    source.add_argument("--gpu", help=f"plan from the training flags after --, for one of {', '.join(GPUS)}")
    parser.add_argument("--memory-gib", type=float, help="limit of device memory; default: all of the device")
    parser.add_argument("--host-gib", type=float, help="limit of pinned host memory")
    parser.add_argument("--save", type=Path, help="write the plan here")
    parser.add_argument("--save-profile", type=Path, help="write the profile of this plan here")
    parser.add_argument("--curve", type=Path, help="draw step time against memory into this image file")
    parser.add_argument("--link-gb-s", type=float, help="assume copies at this speed, in each direction")
    parser.add_argument("--seq-length", type=int, help="assume this sequence length")
    parser.add_argument("--micro-batch-size", type=int, help="assume this micro-batch size")
    parser.add_argument("--num-gpus", type=int, help="with --gpu: number of GPUs; default: one model replica")
    parser.add_argument("--pipeline-rank", type=int, help="with --gpu: stage to plan; default: 0")
    parser.add_argument("--summary", type=Path, help="with --gpu: --swap-summary file to print beside the prediction")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="with --gpu: the training command's flags")
    options = parser.parse_args(arguments)
    try:
        check(options)
        plan(options)
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def check(options: argparse.Namespace) -> None:
    """Refuse options without effect, numbers out of range and files that cannot be written, before planning.

    Raises:
        UsageError: names the option and the remedy.
    """
    source = next(name for name in ("show", "profile", "gpu") if getattr(options, name) is not None)
    ignored = {"show": vars(options).keys() - {"show"}, "profile": WITH_GPU, "gpu": ()}[source]
    for name, given in vars(options).items():
        if name in ignored and given not in (None, []):
            what = given[0] if name == "flags" else f"{_flag(name)} {given}"
            why = "prints a plan file and plans nothing" if source == "show" else "knows its model and its stage"
            raise UsageError(f"{what}: does not go with --{source}, which {why}. Leave it out, or plan with --gpu.")
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


def plan(options: argparse.Namespace) -> None:
    """Print a plan file; or make a plan, print it with its predictions, and write the files that the options name.

    Raises:
        UsageError: no plan fits, or a file is invalid.
        OSError: a file cannot be read or written.
    """
    if options.show is not None:
        shown = load_plan(options.show)
        print(plan_heading(shown), plan_table(shown), sep="\n\n")
        return
    training = None
    if options.gpu:
        check_known(options.flags)
        training = read_flags(options.flags, options.num_gpus)
    profile = find_profile(options, training)
    measured = () if options.summary is None else read_measured(options.summary, profile)
    budget_gib = profile.device.memory_gib if options.memory_gib is None else options.memory_gib
    if options.gpu and budget_gib > profile.device.memory_gib:
        raise UsageError(f"--memory-gib {budget_gib:g}: {profile.device.name} has {profile.device.memory_gib:g} GiB.")
    solution = solve_fractions(profile, budget_gib)
    fraction = solution.plan.offload_fraction
    planned = profile if fraction is None else with_fraction(profile, fraction)
    unswapped = simulate(planned, empty_plan(planned))
    for table in filter(None, (plan_table(solution.plan), non_layer_table(profile))):
        print(table, end="\n\n")
    if training is not None:
        num_params = params_of_rank(profile.model, training.tied, profile.pipeline.rank)
        states = training.states if fraction is None else replace(training.states, offload_fraction=fraction)
        limit_gib = host_limit_gib(options, training)
        before_disk_gib = None if not training.disk_gib else math.inf if limit_gib is None else limit_gib
        table = memory_table(states, num_params, planned, solution.prediction, before_disk_gib, measured)
        print(table, end="\n\n")
    print(prediction_text(planned, solution.prediction, unswapped, solution.lower_bound_ms))
    if options.save:
        save_plan(solution.plan, options.save)
    if options.save_profile:
        save_profile(profile, options.save_profile)
    if options.curve:
        draw(curve(profile), unswapped, profile, options.curve)


def find_profile(options: argparse.Namespace, training: Training | None) -> Profile:
    """Return the profile of the options or of the training flags, scaled to the assumptions that the options make.

    Raises:
        UsageError: the file is no profile, the GPU is unknown, or optimizer state alone exceeds the host limit.
    """
    host_gib, rank = host_limit_gib(options, training), options.pipeline_rank or 0
    if training is None:
        profile = load_profile(options.profile)
    else:
        states = training.states
        num_params = params_of_rank(training.model, training.tied, rank)
        if states.is_auto and host_gib is not None:
            most_gib = max_offloaded_state_gib(host_gib, training.disk_gib)
            states = replace(states, offload_fraction=min(1.0, most_gib / states.state_gib(num_params)))
        profile = shape_profile(
            training.model, find_gpu(options.gpu), training.num_micro_batches, tied=training.tied,
            states=states, pipeline_rank=rank,
        )  # fmt: skip
        if host_gib is not None:
            offloaded_gib = states.offloaded_gib(num_params)
            if offloaded_gib > host_gib and not training.disk_gib:
                flag = "--host-gib" if options.host_gib is not None else "--swap-host-gib"
                raise UsageError(
                    f"{flag} {host_gib:g}: the offloaded optimizer state takes {offloaded_gib:.2f} GiB. Lower "
                    "--swap-optimizer among the training flags, or add --swap-disk-dir to them."
                )
            host_gib = max(0.0, host_gib - offloaded_gib)
    if options.link_gb_s is not None:
        profile = with_link(profile, options.link_gb_s)
    if options.seq_length is not None or options.micro_batch_size is not None:
        profile = with_tokens(profile, options.seq_length, options.micro_batch_size)
    return replace(profile, host_gib=host_gib) if host_gib is not None else profile


def host_limit_gib(options: argparse.Namespace, training: Training | None) -> float | None:
    """Return the rank's host memory limit in GiB from --host-gib, else from the training flags; `None`: no limit."""
    given: float | None = options.host_gib
    return training.host_gib if given is None and training is not None else given


def read_measured(path: Path, profile: Profile) -> tuple[MemoryRow, ...]:
    """Return the memory of the planned stage's first rank from a run's summary.

    Raises:
        UsageError: the file is no summary, or its run has another number of layers.
    """
    try:
        summary = json.loads(read_text(path))
        num_layers, ranks = summary["num_layers"], summary["ranks"]
        rank = ranks[profile.pipeline.rank * len(ranks) // profile.model.pipeline_parallel]
        rows = rank["memory"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"--summary {path}: is not what --swap-summary writes today ({type(error).__name__}: {error}). Train again "
            "with it, or leave --summary out."
        ) from error
    if num_layers != profile.model.num_layers:
        raise UsageError(
            f"--summary {path}: is of {num_layers} layers, the training flags say {profile.model.num_layers}. Give the "
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


def draw(points: list[Solution], unswapped: Prediction, profile: Profile, path: Path) -> None:
    """Draw step time, relative to nothing swapped, against device memory in GiB."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=130, layout="constrained")
    budgets = [point.plan.budget_gib or 0.0 for point in points]
    relative = [point.prediction.step_ms / unswapped.step_ms for point in points]
    bounds = [point.lower_bound_ms / unswapped.step_ms for point in points]
    axes.step(budgets, relative, where="post", color="#c2410c", label="fastest plan found")
    axes.plot(budgets, bounds, color="#94a3b8", linestyle="--", label="lower bound of all plans")
    axes.plot(unswapped.peak_gib, 1.0, "o", color="#1e293b", label="nothing swapped")
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

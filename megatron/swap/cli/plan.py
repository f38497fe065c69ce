"""Say whether a training run fits a GPU, by which flags, and how fast it will be: on any machine, without the GPU.

    megatron-swap plan --gpu h100 -- --num-layers 32 --hidden-size 4096 … your training flags
    megatron-swap plan --gpu h100 --gpus-per-host 8 --host-gib 1000 -- … your training flags
    megatron-swap plan --gpu custom:79.1,989,63 --memory-gib 70 --save plan.json -- … your training flags
    megatron-swap plan --gpu h100 --hf config.json --seq-length 8192
    megatron-swap plan --profile profile.json --memory-gib 24 --link-gb-s 12 --seq-length 8192 --curve curve.png
    megatron-swap plan --show plan.json

Prints a verdict, the training command, speed and peak memory, and a table: nothing, full recomputation, a plan, a plan
with offloaded optimizer state, and with a disk beside it. --table adds what is kept, swapped and recomputed, and the
memory of weights, gradients, optimizer state and activations on each tier. With --summary run.json the memory that a
run measured (--swap-summary) is printed beside the prediction.

--swap-memory-gib, --swap-memory-fraction, --swap-optimizer, --swap-host-gib and --swap-disk-dir among the training
flags limit the plan as they limit training. With --hf a Hugging Face model is planned from its config file: the table
has the rows nothing, checkpointing and planned, and swap.activations in the loop plans. A profile comes from training
(--swap-save-profile) or from training flags (--save-profile). Exit status: 0, or 1 if nothing fits or an input
is wrong.
"""

import argparse
import json
import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.swap.cli.plan_text import HOST_NOTE, POSITIONS_NOTE, advice, floor, notes, stage_line, verdict
from megatron.swap.cli.remedies import is_needed, remedies, remedy_line
from megatron.swap.cli.training_command import training_command
from megatron.swap.common.flags import CommandLine
from megatron.swap.common.plan import Model, load_plan, save_plan
from megatron.swap.common.printable import printable
from megatron.swap.common.records import from_json, read_text
from megatron.swap.common.settings import USUAL_FRACTION, check_files
from megatron.swap.common.types import MOST, MemoryRow, UsageError
from megatron.swap.forecast.flags import Training, check_known, read_flags, training_flags
from megatron.swap.forecast.gpus import CUSTOM_SYNTAX, GPUS, MAX_PER_HOST, find_gpu
from megatron.swap.forecast.options import DISK, STATE, Option, best, of_profile, of_training
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.forecast.shape import params_of_rank
from megatron.swap.forecast.stages import Decision, decide, planned_ranks
from megatron.swap.forecast.table import memory_table, options_table, prediction_text
from megatron.swap.forecast.what_if import with_link, with_tokens
from megatron.swap.planner.profile import Profile, save_profile
from megatron.swap.planner.solve import Solution, curve
from megatron.swap.planner.table import non_layer_table, plan_heading, plan_table

WITH_GPU = ("num_gpus", "gpus_per_host", "pipeline_rank", "summary", "flags")  # options that need --gpu
ONLY_HF = ("weights", "optimizer", "loss_chunk_tokens")  # options that need --hf
NOT_WITH_HF = ("num_gpus", "pipeline_rank", "summary", "save", "flags")  # options of Megatron's training
DISK_NOTE = "The disk's speed is not known: 1.2 GB/s written and 2.2 read are assumed."


class _PlanLine(CommandLine):
    """The options of plan. A training flag among them has lost its ``--``."""

    def unknown(self, words: list[str]) -> str:
        lost = next((name for word in words if (name := word.partition("=")[0]) in training_flags()), None)
        if lost is None:
            return super().unknown(words)
        return f"{lost} is a training flag. Training flags go behind --, as in `{self.prog} --gpu h100 -- {lost} …`."


def main(arguments: list[str] | None = None) -> int:
    """Plan, print and write the files that ``arguments`` (None: those of this process) name. Return the exit status."""
    parser = _PlanLine(
        prog="megatron-swap plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--profile", type=Path, help="a measured profile")
    source.add_argument("--show", type=Path, metavar="PLAN", help="print this plan file and plan nothing")
    source.add_argument("--gpu", help=f"plan from the training flags after --, for one of {', '.join(GPUS)}, "
                        f"or for {CUSTOM_SYNTAX}: GiB of memory, dense bf16 TFLOP/s of its data sheet, GB/s of its "
                        "link in one direction")  # fmt: skip
    parser.add_argument("--hf", type=Path, metavar="CONFIG",
                        help="with --gpu: plan a causal language model of transformers, from its config.json or the "
                        "folder of that: no weights, no download")  # fmt: skip
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
    parser.add_argument("--weights", choices=["bf16", "mixed"],
                        help="with --hf: all in bf16 (default), or weights, gradients and moments in fp32, autocast to "
                        "bf16")  # fmt: skip
    parser.add_argument("--optimizer", choices=["adamw", "adamw-fused", "none"],
                        help="with --hf: torch's AdamW (default), the same with fused=True and clipping as Trainer "
                        "has it, or forward and backward alone")  # fmt: skip
    parser.add_argument("--loss-chunk-tokens", type=int,
                        help="with --hf: the loop computes the loss in chunks of so many tokens, each of them again in "
                        "backward; default: the model's own loss")  # fmt: skip
    parser.add_argument("--num-gpus", type=int, help="with --gpu: number of GPUs; default: one model replica")
    parser.add_argument("--gpus-per-host", type=int,
                        help="with --gpu: GPUs that share a host's memory and link; default: all GPUs of the run, at "
                        f"most {MAX_PER_HOST}")  # fmt: skip
    parser.add_argument("--pipeline-rank", type=int,
                        help="with --gpu: stage to plan; default: the first and the last, of which the one that "
                        "decides is printed; with --save: 0")  # fmt: skip
    parser.add_argument("--summary", type=Path, help="with --gpu: --swap-summary file to print beside the prediction")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="with --gpu: the training command's flags")
    options = parser.parse_args(arguments)
    own = [name for action in parser._actions for name in action.option_strings]
    try:
        check(options)
        return 0 if plan(options, own) else 1
    except (UsageError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1


def check(options: argparse.Namespace) -> None:
    """Raise ``UsageError`` for options without effect, numbers out of range and files that cannot be written."""
    source = next(name for name in ("show", "profile", "gpu") if getattr(options, name) is not None)
    ignored = {"show": vars(options).keys() - {"show"}, "profile": WITH_GPU, "gpu": ()}[source]
    for name, given in vars(options).items():
        if name in ignored and given is not False and given not in (None, []):
            what = given[0] if name == "flags" else f"{_flag(name)} {given}"
            why = "prints a plan file and plans nothing" if source == "show" else "knows its model and its stage"
            raise UsageError(f"{what}: does not go with --{source}, which {why}. Leave it out, or plan with --gpu.")
    _check_hf(options)
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


def _check_hf(options: argparse.Namespace) -> None:
    given = {name: getattr(options, name) for name in (*ONLY_HF, *NOT_WITH_HF)}
    given = {name: what for name, what in given.items() if what not in (None, [])}
    if options.hf is None:
        if wrong := [name for name in given if name in ONLY_HF]:
            raise UsageError(f"{_flag(wrong[0])} {given[wrong[0]]}: is for --hf alone. Leave it out.")
        return
    if options.gpu is None:
        raise UsageError(f"--hf {options.hf}: needs --gpu, one of {', '.join(GPUS)}, or {CUSTOM_SYNTAX}.")
    if wrong := [name for name in given if name in NOT_WITH_HF]:
        what = given["flags"][0] if wrong[0] == "flags" else f"{_flag(wrong[0])} {given[wrong[0]]}"
        raise UsageError(f"{what}: does not go with --hf: Megatron does not train there. Leave it out.")
    if options.seq_length is None:
        raise UsageError(f"--hf {options.hf}: needs --seq-length, the tokens of a sequence.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def plan(options: argparse.Namespace, own: Collection[str] = ()) -> bool:
    """Plan and print what the options name (``own``: no training flags). Return whether something fits."""
    if options.show is not None:
        shown = load_plan(options.show)
        print(plan_heading(shown), plan_table(shown), sep="\n\n")
        return True
    if options.hf is not None:
        return _plan_hf(options)
    if options.gpu is None:
        return _plan_profile(options)
    check_known(options.flags, own)
    return _plan_training(options, read_flags(options.flags, options.num_gpus))


def _plan_training(options: argparse.Namespace, training: Training) -> bool:
    training = _of_sizes(training, options)
    stages = training.model.pipeline_parallel
    per_host = options.gpus_per_host or min(training.num_gpus, MAX_PER_HOST)
    if training.num_gpus > per_host and training.num_gpus % per_host:
        raise UsageError(f"--gpus-per-host {per_host}: must divide the {training.num_gpus} GPUs of the run.")
    gpu = find_gpu(options.gpu).beside(per_host)
    budget_gib = _training_budget_gib(options, training, gpu.memory_gib)
    if budget_gib > gpu.memory_gib:
        raise UsageError(f"--memory-gib {budget_gib:g}: {gpu.name} has {gpu.memory_gib:g} GiB.")
    if not 0 <= (options.pipeline_rank or 0) < stages:
        raise UsageError(f"--pipeline-rank {options.pipeline_rank}: must be 0 to {stages - 1}.")
    ranks = planned_ranks(stages, options.pipeline_rank, is_saved=options.save is not None)
    host_gib, given_host = _host_limit(options, training, per_host)
    for rank in ranks:
        _check_host(training, host_gib, given_host, rank)
    summary = options.summary
    of_ranks = {rank: () if summary is None else read_measured(summary, training.model, rank) for rank in ranks}
    disk_dir = _disk_dir(options.flags)

    def planned(training: Training) -> Decision:
        return decide(
            {one: of_training(training, gpu, budget_gib, host_gib, one, disk_dir, options.link_gb_s) for one in ranks},
            lambda found: best(_wanted(found, training, options.save is not None), is_disk_given=training.disk_gib > 0),
        )

    def planned_with(flags: Sequence[str]) -> Decision:
        assumed = argparse.Namespace(**vars(options))
        if "--micro-batch-size" in flags:
            assumed.micro_batch_size = None  # otherwise the option would win over the flag
        return planned(_of_sizes(read_flags([*options.flags, *flags], options.num_gpus), assumed))

    decision = planned(training)
    rank, found, chosen, measured = decision.rank, decision.found, decision.chosen, of_ranks[decision.rank]
    stage = stage_line(rank, stages, len(ranks), chosen is not None)
    stage = f"\n{stage}" if stage else ""
    better = remedies(training, planned_with) if is_needed(chosen, found[0], training) else []
    remedy = f"\n{remedy_line(better, training.tokens, chosen is not None)}" if better else ""
    on = f"in {budget_gib:.4g} of the {gpu.memory_gib:g} GiB of {gpu.name}"
    budget = ["--swap-plan", str(options.save)] if options.save else ["--swap-memory-gib", floor(budget_gib)]
    flags: list[str] = []
    if chosen is None:
        print(f"Does not fit {on}. {advice(decision.least, training, budget_gib, rank)}{stage}{remedy}", end="\n\n")
    else:
        flags = [*(budget if chosen.is_planned else ()), *chosen.flags]
        if chosen.is_planned and host_gib is not None:
            flags += ["--swap-host-gib", floor(host_gib)]
        said = verdict(chosen, found[0], on, flags, training.num_gpus, training.disk_gib > 0)
        print(f"{said}{stage}{remedy}", end="\n\n")
        print(training_command(options.flags, flags, training.num_gpus, per_host), end="\n\n")
        if not training.has_positions:
            print(POSITIONS_NOTE, end="\n\n")
        print(prediction_text(chosen, found[0], training.tokens), end="\n\n")
    print(options_table(found, training.tokens, decision.unfit))
    if chosen is not None and chosen.disk_gib:
        print(f"\n{DISK_NOTE}")
    for note in notes(options, training, gpu, per_host, decision):
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


def _of_sizes(training: Training, options: argparse.Namespace) -> Training:
    """Return ``training`` with the sequence length and the micro-batch size that the options assume."""
    sizes = {name: getattr(options, name) for name in ("seq_length", "micro_batch_size")}
    given = {name: size for name, size in sizes.items() if size is not None}
    return replace(training, model=replace(training.model, **given))


def _plan_profile(options: argparse.Namespace) -> bool:
    profile = load_profile(options.profile)
    if options.host_gib is not None:
        profile = replace(profile, host_gib=options.host_gib)
    if options.link_gb_s is not None:
        profile = with_link(profile, options.link_gb_s)
    if options.seq_length is not None or options.micro_batch_size is not None:
        profile = with_tokens(profile, options.seq_length, options.micro_batch_size)
    budget_gib = USUAL_FRACTION * profile.device.memory_gib if options.memory_gib is None else options.memory_gib
    model = profile.model
    tokens = model.seq_length * model.micro_batch_size * profile.num_micro_batches
    found = of_profile(profile, budget_gib)
    budget = f"--swap-plan {options.save}" if options.save else f"--swap-memory-gib {floor(budget_gib)}"
    chosen = found[-1] if found[-1].fits else None
    flags = (budget, *found[-1].flags)
    on = f"in {budget_gib:.4g} GiB of {printable(profile.device.name)}"
    return _report(options, found, chosen, on, tokens, flags)


def _plan_hf(options: argparse.Namespace) -> bool:
    from megatron.swap.cli.plan_hf import plan_model  # imports torch, which other plans do not need

    made = plan_model(options)
    flags = (made.call,) if made.call else ()
    fits = _report(options, made.found, made.chosen, made.on, made.tokens, flags, planned_by=made.planned_by)
    if options.host_gib is None and made.chosen is not None and made.chosen.host_gib:
        print(f"\n{HOST_NOTE}")
    return fits


def _report(
    options: argparse.Namespace, found: Sequence[Option], chosen: Option | None, on: str, tokens: int,
    flags: Sequence[str], planned_by: str = "--swap-memory-gib …",
) -> bool:  # fmt: skip
    """Print all options, and which fits ``on`` a GPU, and write files. Return whether something fits."""
    if chosen is not None:
        print(verdict(chosen, found[0], on, flags))
        print(f"\n{prediction_text(chosen, found[0], tokens)}\n")
    else:
        least_gib = min(one.needed_gib for one in found)
        print(f"Does not fit {on}. The smallest budget that was found feasible is {least_gib:g} GiB.\n")
    print(options_table(found, tokens, planned_by=planned_by))
    if chosen is None:
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


def _training_budget_gib(options: argparse.Namespace, training: Training, device_gib: float) -> float:
    """Return the budget from --memory-gib or from the training flags, else training's default."""
    given, fraction = training.budget_gib, training.budget_fraction
    flag = "" if given is None else f"--swap-memory-gib {given:g}"
    if fraction is not None:
        given, flag = fraction * device_gib, f"--swap-memory-fraction {fraction:g}"
    asked: float | None = options.memory_gib
    if asked is not None and given is not None and floor(asked) != floor(given):
        raise UsageError(
            f"--memory-gib {asked:g} and {flag} among the training flags both say how much memory a step may take. "
            "Drop one."
        )
    if asked is None:
        asked = given
    return USUAL_FRACTION * device_gib if asked is None else asked


def _host_limit(options: argparse.Namespace, training: Training, per_host: int) -> tuple[float | None, str]:
    """Return the smaller limit of a rank's host memory, and the flag that says it; None if neither is given."""
    limits = []
    if options.host_gib is not None:
        limits.append((options.host_gib / per_host, f"--host-gib {options.host_gib:g}"))
    if training.host_gib is not None:
        limits.append((training.host_gib, f"--swap-host-gib {training.host_gib:g}"))
    return min(limits, default=(None, ""))


def _wanted(found: Sequence[Option], training: Training, is_saved: bool) -> list[Option]:
    """Return the options to choose from: those that can be saved as a plan, and that do what the flags ask for."""
    if training.offloads:
        return [one for one in found if one.name == DISK or (one.name == STATE and not training.disk_gib)]
    return [one for one in found if one.is_planned] if is_saved else list(found)


def _disk_dir(flags: Sequence[str]) -> str:
    """Return the folder of --swap-disk-dir among the training flags, or a folder that every machine has."""
    words = [part for word in flags for part in word.split("=", 1)]
    return words[words.index("--swap-disk-dir") + 1] if "--swap-disk-dir" in words[:-1] else "/tmp"


def _check_host(training: Training, host_gib: float | None, given: str, rank: int) -> None:
    """Refuse a given fraction of optimizer state that exceeds the rank's host memory."""
    offloaded_gib = training.states.offloaded_gib(params_of_rank(training.model, training.tied, rank))
    if host_gib is None or training.disk_gib or training.states.is_auto or offloaded_gib <= host_gib:
        return
    raise UsageError(
        f"{given}: the offloaded optimizer state takes {offloaded_gib:.2f} GiB. Lower --swap-optimizer among the "
        "training flags, or add --swap-disk-dir to them."
    )


def read_measured(path: Path, model: Model, pipeline_rank: int) -> tuple[MemoryRow, ...]:
    """Return the memory of the planned stage's first rank from a run's summary."""
    try:
        summary = json.loads(read_text(path))
        num_layers, ranks = summary["num_layers"], summary["ranks"]
        rank = ranks[pipeline_rank * len(ranks) // model.pipeline_parallel]
        rows = rank["memory"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
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
    """Raise ``UsageError`` if matplotlib is missing, or draws no image file of that name."""
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

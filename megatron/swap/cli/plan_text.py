"""Sentences of megatron-swap plan: the verdict, advice where nothing fits, and notes."""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.swap.common.types import GIB, format_bytes
from megatron.swap.forecast.flags import Training, not_counted
from megatron.swap.forecast.gpus import Gpu
from megatron.swap.forecast.loss_chunks import choose_num_chunks, saved_bytes
from megatron.swap.forecast.mlp_chunks import MLP_CHUNKS, advised_num_chunks
from megatron.swap.forecast.options import Option
from megatron.swap.forecast.shape import params_of_rank
from megatron.swap.forecast.stages import Decision

LONG = 32768  # tokens of a sequence from which on context parallelism is advised
SLOW = 1.2  # step time over the unswapped step from which on shared optimizer state is advised
PACKS = ("--dataloader-inter-document-masking", "--sft")
"""Flags that pack documents, whose lengths set the time of attention and are not among the flags."""
HOST_NOTE = "Host memory is taken for unlimited: --host-gib says how much of it a host can pin."
POSITIONS_NOTE = "Megatron also needs --max-position-embeddings (at least the sequence length)."


def floor(gib: float) -> str:
    """Format GiB for a flag: rounded down to two decimals, or as it is if it is small."""
    return f"{math.floor(100 * gib) / 100:g}" if gib >= 1 else f"{gib:.10g}"


def verdict(
    chosen: Option, unswapped: Option, on: str, flags: Sequence[str], num_gpus: int = 1, is_disk_given: bool = True
) -> str:
    """Return a sentence on the chosen option: its step time, its memory besides the device's, and its flags."""
    if not flags:
        return f"Fits {on}, as it is: nothing needs to be swapped or recomputed."
    times = relative_time(chosen, unswapped)
    tiers = [f"{format_bytes(gib * GIB)} of {what}"
             for gib, what in ((chosen.host_gib, "host memory"), (chosen.disk_gib, "disk")) if gib]  # fmt: skip
    only = " only with a disk," if chosen.disk_gib and not is_disk_given else ""
    each = " for each GPU" if num_gpus > 1 else ""
    beside = f", with {' and '.join(tiers)}{each}" if tiers else ""
    return f"Fits {on}{only} at {times:.2f} x the unswapped step time{beside}: {' '.join(flags)}"


def stage_line(rank: int, num_stages: int, num_planned: int, fits: bool) -> str:
    """Return which pipeline stage the figures are of; empty: there is one stage."""
    if num_stages == 1:
        return ""
    stage = f"tage {rank} of {num_stages}"
    if not fits:
        return f"S{stage} does not fit (stages count from 0)."
    which = {1: "", 2: ", the slower one" if num_stages == 2 else ", the slower one of first and last"}[num_planned]
    return f"Figures of s{stage}{which} (stages count from 0)."


def advice(least: Option, training: Training, budget_gib: float, rank: int) -> str:
    """Return the smallest budget of all options (``least``, of stage ``rank``), and changes that lower it."""
    flags = " and ".join((*(("a plan",) if least.is_planned else ()), *filter(None, (" ".join(least.flags),))))
    model, states = training.model, least.states or training.states
    params = params_of_rank(model, training.tied, rank)
    weights_gib = states.weights_gib(params) + states.gradients_gib(params)
    is_full = states.device_gib(params) > budget_gib  # no shorter step can help
    hints = [f"--tensor-model-parallel-size {2 * model.tensor_parallel}"]
    if not is_full:
        hints.insert(0, "a smaller --micro-batch-size" if model.micro_batch_size > 1 else "a shorter --seq-length")
    if model.seq_length >= LONG:
        hints.append(f"--context-parallel-size {2 * model.context_parallel}")
    if states.gradient_bytes == 4 and model.dtype == "bf16":
        shares = training.shares_state or num_holders(training) > 1  # a note advises it
        flag = "" if shares else " --use-distributed-optimizer"
        hints.append(f"16-bit gradients (--main-grads-dtype bf16 --use-precision-aware-optimizer{flag})")
    num_mlp_chunks = advised_num_chunks(model)
    cut = replace(model, mlp_chunks=max(num_mlp_chunks, model.mlp_chunks))  # the loss as fine as the MLP will be
    num_loss_chunks = choose_num_chunks(cut, training.has_sum_in_loss)
    if not is_full and rank == model.pipeline_parallel - 1 and num_loss_chunks > training.num_loss_chunks:
        hints.insert(0, f"--swap-loss-chunks {num_loss_chunks}")
    if not is_full and num_mlp_chunks > 1:
        hints.insert(0, f"{MLP_CHUNKS} {num_mlp_chunks}")
    if training.offloads and not training.states.is_auto and training.states.offload_fraction < 1:
        hints.insert(0, "--swap-optimizer auto")
    alone = f"Weights and gradients alone take {weights_gib:.1f} GiB. " if weights_gib > budget_gib else ""
    return (
        f"The least is {least.needed_gib:g} GiB, with {flags or 'nothing'}. {alone}Lower it by one or several "
        f"of: {', '.join(hints)}, or take a GPU with more memory."
    )


def num_holders(training: Training) -> int:
    """Return how many ranks hold the same weights, and can share their optimizer state."""
    return training.num_replicas * training.model.context_parallel


def notes(
    options: argparse.Namespace, training: Training, gpu: Gpu, per_host: int, decision: Decision
) -> Iterator[str]:
    """Yield notes on figures that are left out or assumed, and on flags that would make the run faster."""
    stages, chosen = training.model.pipeline_parallel, decision.chosen
    prediction = None if chosen is None or not chosen.is_planned else chosen.prediction
    shape = training.model, training.has_sum_in_loss
    may_chunk = training.loss_chunks is None and choose_num_chunks(*shape) > 1
    if prediction is not None and prediction.peak_at.startswith("at the loss") and may_chunk:
        yield (
            f"The loss sets the peak. --swap-loss-chunks {choose_num_chunks(*shape)} takes up to "
            f"{format_bytes(saved_bytes(*shape))} less there, and computes the logits twice."
        )
    if options.save is not None and stages > 1:
        yield f"The plan is for stage {decision.rank} of {stages}. --pipeline-rank plans another stage."
    holders = num_holders(training)
    is_slow = chosen is None or relative_time(chosen, decision.found[0]) >= SLOW
    if holders > 1 and not training.shares_state and is_slow:
        which = "data-parallel" if training.model.context_parallel == 1 else "data- and context-parallel"
        yield f"Add --use-distributed-optimizer: the {holders} {which} ranks then share the optimizer state."
    if training.num_gpus > 1:
        yield "Communication between GPUs is not counted."
    if per_host > 1:
        if options.link_gb_s is not None:
            gpu = replace(gpu, link_gb_s=options.link_gb_s, link_both_gb_s=options.link_gb_s)
        link = f"{gpu.link_gb_s:g} GB/s in one direction, {gpu.link_both_gb_s:g} in each of both"
        shared = f"{per_host} GPUs of a host share its memory and its link: each copies at {link}"
        yield f"{shared}, as measured on an H200 host." if options.link_gb_s is None else f"{shared}, as given."
    if options.host_gib is None and training.host_gib is None:
        yield HOST_NOTE
    if uncounted := not_counted(options.flags):
        yield f"Not counted, though they change memory: {', '.join(uncounted)}."
    if packs := [flag for flag in PACKS if flag in options.flags]:
        yield (
            f"{packs[0]}: attention is predicted over whole sequences. Over packed documents it takes less time, so it "
            "hides fewer copies. With --swap-memory-gib training measures and plans by itself."
        )


def relative_time(option: Option, unswapped: Option) -> float:
    assert option.prediction is not None
    assert unswapped.prediction is not None
    return option.prediction.step_ms / unswapped.prediction.step_ms

"""A user's training flags, as far as they decide sizes: enough to plan before Megatron is installed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.swap.plan import Model
from megatron.swap.types import UsageError


@dataclass(frozen=True)
class Training:
    """What ``shape_profile`` needs to know of a run."""

    model: Model
    num_micro_batches: int
    tied: bool
    optimizer_shards: int


def read_flags(flags: Sequence[str], num_gpus: int | None = None) -> Training:
    """Megatron's flags, with its defaults; those that do not change sizes are passed over.

    ``num_gpus``: GPUs of the run; by default one model replica's.

    Raises:
        UsageError: a flag is missing or its value impossible.
    """
    known, _ = _parser().parse_known_args(list(flags))
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        if getattr(known, name) is None:
            raise UsageError(f"--{name.replace('_', '-')} is missing among the training flags behind --.")
    tensor, pipeline, context = (
        known.tensor_model_parallel_size, known.pipeline_model_parallel_size, known.context_parallel_size,
    )  # fmt: skip
    replica = tensor * pipeline * context
    data = (num_gpus or replica) // replica
    if data < 1 or (num_gpus or replica) % replica:
        raise UsageError(f"--num-gpus {num_gpus}: must be a multiple of {replica}, the GPUs of one model replica.")
    per_round = known.micro_batch_size * data
    batch = known.global_batch_size or per_round
    if batch % per_round:
        raise UsageError(f"--global-batch-size {batch}: must be a multiple of {per_round}, micro-batch x replicas.")
    divisor = known.make_vocab_size_divisible_by * tensor
    virtual = known.num_virtual_stages_per_pipeline_rank or 1
    if known.num_layers_per_virtual_pipeline_stage:
        virtual = known.num_layers // pipeline // known.num_layers_per_virtual_pipeline_stage
    heads = known.num_attention_heads
    model = Model(
        num_layers=known.num_layers,
        hidden_size=known.hidden_size,
        ffn_hidden_size=known.ffn_hidden_size or _default_ffn(known.hidden_size, known.swiglu),
        num_attention_heads=heads,
        num_query_groups=known.num_query_groups if known.group_query_attention else heads,
        seq_length=known.seq_length,
        micro_batch_size=known.micro_batch_size,
        padded_vocab_size=-(-known.vocab_size // divisor) * divisor,
        transformer_impl=known.transformer_impl,
        dtype="bf16" if known.bf16 else "fp16" if known.fp16 else "fp32",
        gated=known.swiglu,
        num_experts=known.num_experts,
        head_size=known.kv_channels,
        tensor_parallel=tensor,
        sequence_parallel=known.sequence_parallel and tensor > 1,
        pipeline_parallel=pipeline,
        num_virtual_stages=virtual,
        context_parallel=context,
        expert_parallel=known.expert_model_parallel_size,
    )
    shards = data * context if known.use_distributed_optimizer else 1
    return Training(model, batch // per_round, not known.untie_embeddings_and_output_weights, shards)


def _default_ffn(hidden: int, gated: bool) -> int:
    """Megatron's: four times the hidden size; two thirds of that, in steps of 64, where there is a gate."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size",
                 "ffn-hidden-size", "global-batch-size", "kv-channels", "num-experts",
                 "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    for name in ("num-query-groups", "tensor-model-parallel-size", "pipeline-model-parallel-size",
                 "context-parallel-size", "expert-model-parallel-size"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--transformer-impl", default="transformer_engine")
    for name in ("group-query-attention", "swiglu", "bf16", "fp16", "sequence-parallel", "use-distributed-optimizer",
                 "untie-embeddings-and-output-weights"):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    return parser

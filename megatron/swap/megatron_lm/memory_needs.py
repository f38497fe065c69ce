"""Compares the least memory that a run needs with the memory that exists, before the model is built.

All figures are lower bounds from the flags: a run that fits is never refused. A model that the formulas do not cover
counts as 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from megatron.swap.common.settings import Settings, parse_layers
from megatron.swap.common.types import ACTIVATION, GIB, LINEAR, MIB, NORM, ROTARY, SwapError, format_bytes
from megatron.swap.forecast.facts import MegatronFacts, model_of, state_bytes_of
from megatron.swap.forecast.shape import num_params
from megatron.swap.forecast.states import States
from megatron.swap.megatron_lm.checks import device_memory_gib
from megatron.swap.memory.host_memory import HostCapacity, local_world_size, safe_host_bytes

CLOSE = 0.75  # fraction of the memory from which on the needs are called close: they are lower bounds


class OutOfMemoryAhead(SwapError):
    """The run needs more memory than there is. The message has the figures and the flags to change."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Lower bounds of one rank's memory, in bytes."""

    model_bytes: int  # weights, gradients, and the optimizer state that is not offloaded
    # Saved by one micro-batch, without bytes that a disk can take. 0 on a GPU: activations can be swapped.
    activation_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Sum of all needs."""
        return self.model_bytes + self.activation_bytes


@dataclass(frozen=True)
class MemoryCheck:
    """The result of a check that has passed."""

    line: str | None  # needs beside available memory; None if the needs are not known
    capacity: HostCapacity | None  # the host's memory less the model's part; None if the model takes none of it


def check_memory(facts: MegatronFacts, settings: Settings) -> MemoryCheck:
    """Compare this rank's needs with its memory, before any rank builds its model. Raises ``OutOfMemoryAhead``."""
    on_gpu = torch.cuda.is_available()
    needs = memory_needs(facts, settings, on_gpu=on_gpu)
    if on_gpu:
        has_bytes = int(device_memory_gib(facts, settings) * GIB)
        check_device(needs, has_bytes)
        return MemoryCheck(needs_line(needs, has_bytes), None)
    capacity = safe_host_bytes(local_world_size())
    if not settings.host_unchecked:
        check_host(needs, capacity, facts)
    line = needs_line(needs, capacity.available_bytes, capacity.local_world_size)
    return MemoryCheck(line, capacity.less(needs.model_bytes, "model and optimizer"))


def needs_line(needs: MemoryNeeds, has_bytes: int, num_ranks: int = 1) -> str | None:
    """Return a line with the needs beside ``has_bytes``, which ``num_ranks`` share, or None if unknown."""
    if not needs.model_bytes:
        return None
    line = f"at least {format_bytes(needs.model_bytes)} for model and optimizer"
    if needs.activation_bytes:
        line += f", {format_bytes(needs.activation_bytes)} for activations"
    if num_ranks > 1:
        line += f", on each of {num_ranks} ranks"
    close = ": this may not suffice" if needs.num_bytes * num_ranks > CLOSE * has_bytes else ""
    return f"{line}; there are {format_bytes(has_bytes)}{close}"


def memory_needs(facts: MegatronFacts, settings: Settings, *, on_gpu: bool) -> MemoryNeeds:
    """Return the needs of this rank."""
    # Without a GPU swapped tensors stay in the memory that counts, except on disk.
    model_bytes = _model_bytes(facts, settings.offload_fraction if on_gpu or settings.disk_dir is not None else 0.0)
    activation_bytes = 0
    if not on_gpu and not facts.variable_seq_lengths and settings.disk_dir is None:
        is_planned = settings.auto or settings.plan is not None  # a plan may recompute whole layers
        layers = facts.num_layers // facts.pipeline_model_parallel_size
        is_unknown = is_planned or bool(facts.fp8) or facts.recompute_granularity == "selective"
        activation_bytes = least_saved_bytes(facts, layers, settings.recompute, inputs_alone=is_unknown)
    return MemoryNeeds(model_bytes, activation_bytes)


def check_device(needs: MemoryNeeds, has_bytes: int) -> None:
    """Raise an ``OutOfMemoryAhead`` if the model does not fit into ``has_bytes`` of the GPU, whatever is swapped."""
    if needs.model_bytes > has_bytes:
        raise OutOfMemoryAhead(
            f"weights, gradients and optimizer state take at least {format_bytes(needs.model_bytes)} on each rank, and "
            f"the GPU has {format_bytes(has_bytes)}. Offload optimizer state (--swap-optimizer), split the model "
            "(--tensor-model-parallel-size, --pipeline-model-parallel-size), share the state "
            "(--use-distributed-optimizer), or train a smaller model."
        )


def check_host(needs: MemoryNeeds, capacity: HostCapacity, facts: MegatronFacts) -> None:
    """Raise an ``OutOfMemoryAhead`` if host memory cannot hold a run without a GPU."""
    # The kernel would kill such a run without a message.
    ranks = capacity.local_world_size
    if needs.num_bytes * ranks <= capacity.available_bytes:
        return
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    limit = ""
    if capacity.cgroup_limit_bytes is not None:
        limit = f", of which its cgroup may use {format_bytes(capacity.cgroup_limit_bytes)}"
    raise OutOfMemoryAhead(
        f"this run needs at least {format_bytes(needs.num_bytes)} of host memory{each}: "
        f"{format_bytes(needs.model_bytes)} for weights, gradients and optimizer state, "
        f"{format_bytes(needs.activation_bytes)} for the activations of one micro-batch ({facts.micro_batch_size} x "
        f"{facts.seq_length} tokens). {format_bytes(capacity.available_bytes)} are available on this machine, which "
        f"has {format_bytes(capacity.total_bytes)}{limit}. Without a GPU, swapped tensors stay in the same memory. "
        "Train a smaller model, lower --micro-batch-size or --seq-length, or recompute (--recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1)."
    )


def _model_bytes(facts: MegatronFacts, offload_fraction: float) -> int:
    """Return a lower bound of weights, gradients and kept optimizer state on this rank, or 0 if it is unknown."""
    is_unusual = (
        facts.num_experts is not None, facts.multi_latent_attention, facts.fp8, facts.fp4, facts.use_megatron_fsdp,
        facts.use_torch_fsdp2, facts.init_model_with_meta_device, facts.skip_train, facts.freeze_all_layers,
        facts.heterogeneous_layers_config_path, facts.hybrid_layer_pattern,
    )  # fmt: skip
    if any(is_unusual):
        return 0
    vocabulary = facts.padded_vocab_size or facts.vocab_size or 1  # a tokenizer may give it later
    model = model_of(replace(facts, padded_vocab_size=vocabulary))
    of_layer, of_ends = num_params(model, tied=not facts.untie_embeddings_and_output_weights)
    stages = model.pipeline_parallel
    params = (of_layer * (model.num_layers // stages) + (of_ends if stages == 1 else 0)) / model.tensor_parallel
    has_fp32_gradients = facts.accumulate_allreduce_grads_in_fp32 and not facts.use_precision_aware_optimizer
    has_adam = facts.optimizer == "adam" and not (facts.use_precision_aware_optimizer or facts.optimizer_cpu_offload)
    is_half = facts.bf16 or facts.fp16
    states = States(
        gradient_bytes=4 if has_fp32_gradients or not is_half else 2,
        state_bytes=state_bytes_of(facts) if has_adam else 0,
        num_shards=facts.data_parallel_size * facts.context_parallel_size if facts.use_distributed_optimizer else 1,
        offload_fraction=offload_fraction,
        weight_bytes=2 if is_half else 4,
    )
    return int(states.device_gib(params) * GIB)


def least_saved_bytes(
    facts: MegatronFacts, num_layers: int, recompute: Collection[str] = (), *, min_bytes: float = 0.0,
    inputs_alone: bool = False,
) -> int:  # fmt: skip
    """Return a lower bound of the bytes that ``num_layers`` layers save in one micro-batch on this rank.

    The shapes give norm inputs and outputs, q, k, v, attention output and MLP activations. Outputs of the kinds in
    ``recompute`` and tensors below ``min_bytes`` do not count. ``inputs_alone`` counts only the inputs of layers.
    """
    element_bytes = 2 if facts.bf16 or facts.fp16 else 4
    tensor_parallel = facts.tensor_model_parallel_size
    tokens = facts.micro_batch_size * facts.seq_length // facts.context_parallel_size
    hidden = facts.hidden_size // (tensor_parallel if facts.sequence_parallel else 1)
    widths = [hidden] * (2 if NORM in recompute else 4)
    if facts.recompute_granularity == "full":
        segment = facts.recompute_num_layers if facts.recompute_method == "uniform" else 1
        num_layers, widths = num_layers // (segment or 1), [hidden]
    elif inputs_alone:
        widths = [hidden]
    else:
        if not facts.multi_latent_attention:
            groups = facts.num_query_groups if facts.group_query_attention else facts.num_attention_heads
            heads = [facts.num_attention_heads]  # attention output
            if not {ROTARY, LINEAR} & set(recompute):
                heads += [facts.num_attention_heads, groups, groups]  # q, k, v
            widths += [number * facts.head_size // tensor_parallel for number in heads]
        if facts.num_experts is None:
            fc1 = 0 if LINEAR in recompute else 2 if facts.swiglu else 1
            widths += [facts.mlp_width // tensor_parallel] * (fc1 + (ACTIVATION not in recompute))
    sizes = [tokens * width * element_bytes for width in widths]
    return num_layers * sum(size for size in sizes if size >= min_bytes)


def least_host_bytes(settings: Settings, facts: MegatronFacts) -> int:
    """Return a lower bound of the activations' bytes on this rank, or 0 if it is unknown."""
    if settings.plan is not None:
        # This rank's layers, or the number of trailing kept layers, may not be known yet.
        is_unknown = facts.pipeline_model_parallel_size > 1 or settings.prefetch_gib is not None
        return 0 if is_unknown else settings.plan.least_host_bytes()
    if settings.modules or settings.prefetch_gib or facts.fp8 or facts.recompute_granularity == "selective":
        return 0
    # Serves to reserve host memory early and to refuse a run that cannot fit. More is reserved on demand.
    num_swapped = len(parse_layers(settings.layers, facts.num_layers))
    layers_here = max(0, num_swapped // facts.pipeline_model_parallel_size - 2)  # the trailing layers are kept
    return least_saved_bytes(facts, layers_here, settings.recompute, min_bytes=settings.min_mib * MIB)

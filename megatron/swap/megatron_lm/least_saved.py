"""A lower bound of the bytes that layers save for backward, from the flags."""

from __future__ import annotations

from collections.abc import Collection

from megatron.swap.common.settings import Settings, parse_layers
from megatron.swap.common.types import ACTIVATION, LINEAR, MIB, NORM, ROTARY
from megatron.swap.forecast.facts import MegatronFacts


def least_saved_bytes(
    facts: MegatronFacts,
    num_layers: int,
    recompute: Collection[str] = (),
    *,
    min_bytes: float = 0.0,
    inputs_alone: bool = False,
) -> int:
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
    if settings.plan is None:
        return _least_saved_bytes(settings, facts)
    if facts.pipeline_model_parallel_size > 1 or settings.prefetch_gib is not None:
        return 0  # this rank's layers, or the number of trailing kept layers, are not known yet
    return settings.plan.least_host_bytes()


def _least_saved_bytes(settings: Settings, facts: MegatronFacts) -> int:
    """Return a lower bound of the bytes that swapped layers save in one micro-batch on this rank, or 0: unknown."""
    if settings.modules or settings.prefetch_gib or facts.fp8 or facts.recompute_granularity == "selective":
        return 0
    # Serves to reserve host memory early and to refuse a run that cannot fit. More is reserved on demand.
    num_swapped = len(parse_layers(settings.layers, facts.num_layers))
    layers_here = max(0, num_swapped // facts.pipeline_model_parallel_size - 2)  # the trailing layers are kept
    return least_saved_bytes(facts, layers_here, settings.recompute, min_bytes=settings.min_mib * MIB)

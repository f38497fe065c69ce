"""Figures of a plan's memory that follow from the model alone: Megatron's models, TransformerEngine's kernels."""

from dataclasses import replace

from megatron.swap.common.plan import Model
from megatron.swap.forecast.attention import FLASH, FUSED
from megatron.swap.forecast.fp8 import linear_params
from megatron.swap.forecast.mlp_chunks import ATTENTION, MLP, num_mlp_chunks
from megatron.swap.planner.profile import MAX_FRAGMENTS, ModelFigures, Profile

MAX_FRAGMENTS_IN_8_BITS = 3.0  # as ``MAX_FRAGMENTS``; 2.8 was measured (docs/results/h200-fp8-unfused.jsonl)


def figures_of(model: Model) -> ModelFigures:
    """Return the figures of a model. Sites that are not TransformerEngine's attention have no block."""
    is_grouped = model.num_query_groups < model.num_attention_heads
    has_copies = model.fp8_recipe is not None and model.keeps_fp8_weights
    return ModelFigures(
        copied_weights=linear_params(model) if has_copies else 0.0,
        uncopied_layers=tuple(model.bf16_layers),
        max_fragments=MAX_FRAGMENTS if model.fp8_recipe is None else MAX_FRAGMENTS_IN_8_BITS,
        # Of the query: cuDNN takes its workspace in one block, flash-attn one for each sum (``workspace``).
        blocks=((f"{FUSED}/0", 4.0 if is_grouped else 2.0), (f"{FLASH}/0", 2.0)),
        in_parts=(MLP, ATTENTION),
        num_parts=num_mlp_chunks(model),
    )


def with_figures(profile: Profile) -> Profile:
    return replace(profile, figures=figures_of(profile.model))

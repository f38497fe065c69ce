"""A user's script with a model provider of its own: the lines are the same for each version of Megatron."""

# ruff: noqa: E402

import sys
from typing import Any

from megatron.swap.prepare import prepare

prepare(sys.argv)

from megatron import swap
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import get_args
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron.swap.attention import sdpa_layer_spec
from pretrain_gpt_swap import forward_step, provide_datasets


def provide_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    args = get_args()
    config = core_transformer_config_from_args(args)
    layer_spec = sdpa_layer_spec(base=get_gpt_layer_local_spec())(config)
    return GPTModel(
        config, layer_spec, args.padded_vocab_size, args.seq_length, pre_process, post_process,
        position_embedding_type="rope", share_embeddings_and_output_weights=True, pg_collection=pg_collection,
        vp_stage=vp_stage,
    )  # fmt: skip


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=swap.add_swap_args)
    swap.pretrain(args, provide_datasets, forward_step, model_provider=provide_model)

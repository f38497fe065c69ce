"""Calls of Megatron that differ from version to version: a GPT made from flags, and ``pretrain``.

From 0.19 on, ``gpt_config_from_args`` makes a model config from flags, and ``pretrain`` builds the model from it.
Earlier ``pretrain`` takes a model provider. PyPI's wheel has none, so ``gpt_provider`` makes one.
"""

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm.layer_specs import default_layer_spec, has_model_config, make_layer_spec


def is_gpt_config(model_config: Any) -> bool:
    """Return whether ``model_config`` is Megatron's model config of a GPT, which exists since 0.19."""
    if not has_model_config():
        return False
    from megatron.training.models.gpt import GPTModelConfig

    return isinstance(model_config, GPTModelConfig)


def model_config_of(args: Namespace, layer_spec: Any = None) -> Any:
    """Return Megatron's model config of the GPT that ``args`` describe, if ``has_model_config()``."""
    from megatron.training import argument_utils

    model_config = argument_utils.gpt_config_from_args(args)
    if layer_spec is not None:
        model_config.transformer_layer_spec = layer_spec
    return model_config


def ignored_scaling(args: Namespace, model_config: Any) -> str | None:
    """Return a line if Megatron ignores ``--rope-scaling-factor``, as ``gpt_config_from_args`` does, or None."""
    given = vars(args).get("rope_scaling_factor")
    if not is_gpt_config(model_config) or not args.use_rope_scaling or given == model_config.rope_scaling_factor:
        return None
    return (  # the factor is not set here: weights trained by Megatron alone have positions scaled by the default
        f"--rope-scaling-factor {given:g} has no effect: Megatron's trainer scales by "
        f"{model_config.rope_scaling_factor:g}. Give swap.pretrain a model_provider to scale by another factor"
    )


def gpt_provider(args: Namespace, layer_spec: Any = None) -> Callable[..., Any]:
    """Return a provider of the GPT that ``args`` describe, or raise a ``UsageError`` if a flag needs another model."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training import argument_utils

    for flag, is_given in {
        "--mtp-num-layers": args.mtp_num_layers is not None,
        "--spec": args.spec is not None,
        "--heterogeneous-layers-config-path": args.heterogeneous_layers_config_path is not None,
        "--experimental-attention-variant": args.experimental_attention_variant is not None,
        "--yaml-cfg": args.yaml_cfg is not None,
    }.items():
        if is_given:
            raise UsageError(
                f"{flag}: this Megatron makes no such model from flags. Drop the flag, install megatron-core 0.19, or "
                "give pretrain a model_provider of your own."
            )

    def provide(
        pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None,
        pg_collection: Any = None,
    ) -> Any:  # fmt: skip
        config = argument_utils.core_transformer_config_from_args(args) if config is None else config
        return GPTModel(
            config=config, transformer_layer_spec=make_layer_spec(layer_spec or default_layer_spec, config, vp_stage),
            vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process, post_process=post_process, fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base, rope_scaling=args.use_rope_scaling,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor, pg_collection=pg_collection,
            vp_stage=vp_stage,
        )  # fmt: skip

    return provide


def pretrain_call(
    args: Namespace, model_config: Any, provide_datasets: Callable[..., Any], forward_step: Callable[..., Any],
    **options: Any,
) -> Callable[[], None]:  # fmt: skip
    """Return the call of Megatron's ``pretrain``. Without ``model_config``, ``options`` have a ``model_provider``."""
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, training

    return functools.partial(
        training.pretrain, argument_utils.pretrain_cfg_container_from_args(args, model_config), provide_datasets,
        model_type=ModelType.encoder_or_decoder, forward_step_func=forward_step, **options,
    )  # fmt: skip

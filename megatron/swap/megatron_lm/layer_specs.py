"""Megatron's layer specs, which differ from version to version."""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec


def has_model_config() -> bool:
    """Return whether this Megatron makes a GPT from flags, by ``gpt_config_from_args``."""
    from megatron.training import argument_utils

    return hasattr(argument_utils, "gpt_config_from_args")


def default_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's layer spec for a model's ``config``, and for the virtual pipeline stage ``vp_stage``."""
    if has_model_config():
        from megatron.training.models import gpt

        return gpt.default_layer_spec(config, vp_stage)
    from megatron.core.models.gpt import gpt_layer_specs

    with_te = config.transformer_impl == "transformer_engine"
    if config.num_moe_experts is not None:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config, with_te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm, vp_stage=vp_stage
        )
    options = {
        "qk_layernorm": config.qk_layernorm,
        "qk_l2_norm": config.qk_l2_norm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if with_te:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            **options, use_te_activation_func=config.use_te_activation_func
        )
    return gpt_layer_specs.get_gpt_layer_local_spec(**options, normalization=config.normalization)


def make_layer_spec(layer_spec: Any, config: Any, vp_stage: int | None) -> Any:
    """Return ``layer_spec``, or its result for ``config`` (and ``vp_stage``, if it takes it) if it is a function."""
    if isinstance(layer_spec, ModuleSpec) or not callable(layer_spec):
        return layer_spec
    if "vp_stage" in inspect.signature(layer_spec).parameters:
        return layer_spec(config, vp_stage=vp_stage)
    return layer_spec(config)

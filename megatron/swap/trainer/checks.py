"""Refuses settings that Megatron's trainer cannot run, before it builds anything."""

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE

from megatron.swap.common.layer_ranges import MOST_LAYERS
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.checks import hybrid_pattern
from megatron.swap.trainer.versions import is_gpt_config


def check_flags(args: argparse.Namespace) -> None:
    """Raise a ``UsageError`` for flags with which Megatron would ignore ours, or run out of memory early."""
    given = vars(args)  # before Megatron fills in defaults; another program lacks its flags
    if given.get("yaml_cfg") is not None:
        raise UsageError(
            f"--yaml-cfg {args.yaml_cfg}: Megatron then ignores all flags, so the --swap- flags too. Give the settings "
            "as flags, and drop --yaml-cfg."
        )
    if (given.get("num_layers") or 0) > MOST_LAYERS:  # a list of them may be too long to be made
        raise UsageError(f"--num-layers {args.num_layers}: must be at most {MOST_LAYERS}.")


def check_model_config(model_config: Any) -> None:
    """Raise a ``UsageError`` if the layers of Megatron's ``model_config`` cannot be built here. Other configs pass."""
    if not is_gpt_config(model_config):
        return
    config = model_config.transformer
    check_layer_spec(config.transformer_impl, model_config.transformer_layer_spec)
    if config.transformer_impl == "local" and config.multi_latent_attention and config.mtp_num_layers:
        raise UsageError(
            f"--mtp-num-layers {config.mtp_num_layers} cannot be combined with --multi-latent-attention and "
            "--transformer-impl local: Megatron builds the layers of MTP with a core attention of its own, which takes "
            "no multi-latent attention. Drop --mtp-num-layers, or use --transformer-impl transformer_engine."
        )


def check_layer_spec(transformer_impl: str, layer_spec: Any) -> None:
    """Raise a ``UsageError`` if, without a ``layer_spec``, the layers are TransformerEngine's, which is missing."""
    if layer_spec is None and transformer_impl != "local" and not HAVE_TE:
        raise UsageError(
            f"--transformer-impl {transformer_impl}: TransformerEngine cannot be imported in this Python. Give "
            "--transformer-impl local, or install it (pip install 'transformer-engine[pytorch,core_cu13]')."
        )


def check_is_gpt(args: argparse.Namespace) -> None:
    """Raise a ``UsageError`` for flags of a hybrid model, which a GPT that is made from the flags would ignore."""
    pattern = hybrid_pattern(MegatronFacts.of(vars(args)))
    if pattern is not None:
        raise UsageError(
            f"{pattern}: the flag is for hybrid models, and the flags make a GPT here, which would ignore it. Drop it, "
            "or give swap.pretrain a model_provider."
        )


def check_forward_step(args: argparse.Namespace, forward_step: Callable[..., Any]) -> None:
    """Raise a ``UsageError`` if Megatron schedules layers in parts and ``forward_step`` makes no schedule plan."""
    takes = inspect.signature(forward_step).parameters
    if args.overlap_moe_expert_parallel_comm and "return_schedule_plan" not in takes:
        raise UsageError(
            "--overlap-moe-expert-parallel-comm: Megatron then asks for a schedule plan (return_schedule_plan=True), "
            "which the forward step of this program cannot return. Drop the flag."
        )

"""Megatron's ``pretrain`` with swapping: one call, although its arguments differ from version to version."""

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm.layer_specs import has_model_config
from megatron.swap.megatron_lm.weight_gradients import lacks_kernel
from megatron.swap.patches.weight_gradient_kernel import APEX_MODULE
from megatron.swap.trainer.checks import check_forward_step, check_is_gpt, check_layer_spec
from megatron.swap.trainer.refusals import told_refusals
from megatron.swap.trainer.session import SwapSession
from megatron.swap.trainer.upstream import refuse_fusion_without_kernel
from megatron.swap.trainer.versions import gpt_provider, model_config_of, pretrain_call


def pretrain(
    args: Namespace,
    provide_datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    *,
    model_provider: Callable[..., Any] | None = None,
    layer_spec: Any = None,
    **options: Any,
) -> None:
    """Train by Megatron's ``pretrain``, with swapping as the flags ask.

    Args:
        args: Megatron's parsed arguments, with those of ``add_swap_args``.
        provide_datasets: Megatron's ``train_valid_test_dataset_provider``.
        forward_step: Megatron's ``forward_step_func``.
        model_provider: as for Megatron's ``pretrain``: builds one chunk of the model. By default a GPT from the flags.
        layer_spec: layer spec of this GPT, or a function of the model's config that returns it. By default Megatron's.
        options: more arguments of Megatron's ``pretrain``, by name.

    Raises:
        SwapError, PatchError: as ``SwapSession.install``, before anything is built.
        UsageError: this Megatron makes no such GPT from flags, or refuses the flags; or ``forward_step`` cannot follow
            them.
    """
    builds_gpt = model_provider is None
    with told_refusals(in_full=args.swap_log_level == "debug"):
        check_forward_step(args, forward_step)
        if builds_gpt:
            check_is_gpt(args)
        model_config = None
        if model_provider is None and has_model_config():
            model_config = model_config_of(args, layer_spec)
        elif model_provider is None:
            check_layer_spec(args.transformer_impl, layer_spec)
            model_provider = gpt_provider(args, layer_spec)
        session = SwapSession.install(args, model_config)
        if builds_gpt:  # a model of the user's may have no linear layer of Megatron's own
            try:
                refuse_fusion_without_kernel(args)
            except UsageError:
                session.close()
                raise
        if model_provider is not None:
            options["model_provider"] = _attached(session, model_provider)
        train = pretrain_call(args, model_config, provide_datasets, forward_step, **options)
    train()


def _attached(session: SwapSession, model_provider: Callable[..., Any]) -> Callable[..., Any]:
    """Return a provider that attaches each chunk of ``model_provider`` to ``session``, before Megatron wraps it."""

    @functools.wraps(model_provider)
    def provide(*arguments: Any, **options: Any) -> Any:
        try:
            chunk = model_provider(*arguments, **options)
        except RuntimeError as error:
            if APEX_MODULE in str(error):  # the one thing that Megatron names it for
                raise UsageError(lacks_kernel()) from error
            raise
        session.attach([chunk])
        return chunk

    return provide

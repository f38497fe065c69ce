"""The trainer, recorded as it keeps as little as it can. It writes a profile of two steps at the end."""

# ruff: noqa: E402

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from typing import Any

from megatron.swap.trainer.prepare import prepare

prepare(sys.argv)

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron.swap.common.flags import add_swap_flags
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import MIB, PRODUCERS
from megatron.swap.megatron_lm.attention import sdpa_layer_spec
from megatron.swap.planner.profile import Device, Link, Pipeline, save_profile
from megatron.swap.planning.switch import SafePolicy
from megatron.swap.profiling.profile_builder import build_profile
from megatron.swap.trainer.session import SwapSession
from pretrain_gpt_swap import forward_step, provide_datasets

FIRST, LAST = 2, 3
"""Steps that are recorded, the first and the last."""


class RecordingSession(SwapSession):
    def __init__(self, args: Namespace, config: Settings) -> None:
        super().__init__(args, config)
        self.planned = replace(self.planned, policy=SafePolicy(int(config.min_mib * MIB), PRODUCERS))

    def on_iteration(self, iteration: int, *others: Any) -> None:
        super().on_iteration(iteration, *others)
        assert self.parts is not None
        if iteration == FIRST - 1:
            self.parts.recorder.start(FIRST)
        if iteration == LAST:
            recording = self.parts.recorder.stop()
            args = self._args
            rank, size = args.rank, args.pipeline_model_parallel_size
            deep = args.num_layers // size
            profile = build_profile(
                recording,
                self.hints.describe(),
                Link(50.0, 50.0, 50.0, 50.0),
                Device("cpu", 1.0),
                num_micro_batches=args.global_batch_size // args.micro_batch_size // args.data_parallel_size,
                source="recorded",
                min_mib=self.settings.min_mib,
                pipeline=Pipeline(size, rank, (tuple(range(rank * deep, rank * deep + deep)),)),
            )
            save_profile(profile, f"profile-{rank}.json")


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_swap_flags)
    model_config = gpt_config_from_args(args)
    model_config.transformer_layer_spec = sdpa_layer_spec(args.swap_deterministic, args.reset_attention_mask)
    RecordingSession.install(args, model_config)
    container = pretrain_cfg_container_from_args(args, model_config)
    pretrain(container, provide_datasets, ModelType.encoder_or_decoder, forward_step)

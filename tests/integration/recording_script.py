"""The trainer, recorded: a policy by name or by plan file, a profile of two steps at the end."""

# ruff: noqa: E402

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from megatron.swap.prepare import prepare

prepare(sys.argv)

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron.swap.arguments import add_swap_args
from megatron.swap.attention import sdpa_layer_spec
from megatron.swap.config import SwapConfig
from megatron.swap.plan import Model, Plan, load_plan
from megatron.swap.planner.build import build_profile
from megatron.swap.planner.profile import Device, Link, Pipeline, save_profile
from megatron.swap.policy import Policy
from megatron.swap.session import SwapSession
from megatron.swap.types import Action, Site
from pretrain_gpt_swap import forward_step, provide_datasets

WHAT = {"keep": Action.KEEP, "swap": Action.SWAP, "recompute": Action.RECOMPUTE}
FIRST, LAST = 2, 3
"""Steps that are recorded."""


class Hooked(Policy):
    """All layers are hooked; ``what`` happens to every site, or what ``plan`` says."""

    def __init__(self, what: Action | None, plan: Plan | None) -> None:
        self._what, self._plan = what, plan

    def swaps_layer(self, layer: int) -> bool:
        return self._plan.swaps_layer(layer) if self._plan is not None else self._what is Action.SWAP

    def recomputes_layer(self, layer: int) -> bool:
        return True

    def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
        if self._plan is not None:
            return self._plan.action(site)
        assert self._what is not None
        return self._what


class RecordingSession(SwapSession):
    def __init__(self, args: Namespace, config: SwapConfig) -> None:
        super().__init__(args, config)
        what = WHAT.get(args.record_policy)
        self._policy = Hooked(what, None if what is not None else load_plan(args.record_policy))  # type: ignore[assignment]

    def _on_iteration(self, iteration: int, *others: Any) -> None:
        super()._on_iteration(iteration, *others)
        assert self._recorder is not None
        if iteration == FIRST - 1:
            self._recorder.start(FIRST)
        if iteration == LAST:
            recording = self._recorder.stop()
            args = self._args
            rank, size = args.rank, args.pipeline_model_parallel_size
            deep = args.num_layers // size
            profile = build_profile(
                recording,
                model_of(args),
                Link(50.0, 50.0, 50.0, 50.0),
                Device("cpu", 1.0),
                num_micro_batches=args.global_batch_size // args.micro_batch_size // args.data_parallel_size,
                source="recorded",
                pipeline=Pipeline(size, rank, (tuple(range(rank * deep, rank * deep + deep)),)),
            )
            save_profile(profile, f"profile-{rank}.json")


def model_of(args: Namespace) -> Model:
    return Model(
        args.num_layers, args.hidden_size, args.ffn_hidden_size, args.num_attention_heads, args.num_attention_heads,
        args.seq_length, args.micro_batch_size, args.padded_vocab_size, "local", "fp32", args.swiglu,
        args.num_experts, pipeline_parallel=args.pipeline_model_parallel_size,
    )  # fmt: skip


def add_args(parser: Any) -> Any:
    parser.add_argument("--record-policy", required=True)
    return add_swap_args(parser)


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_args)
    model_config = gpt_config_from_args(args)
    model_config.transformer_layer_spec = sdpa_layer_spec(args.swap_deterministic, args.reset_attention_mask)
    RecordingSession.install(args, model_config)
    container = pretrain_cfg_container_from_args(args, model_config)
    pretrain(container, provide_datasets, ModelType.encoder_or_decoder, forward_step)

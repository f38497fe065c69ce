"""The trainer, whose embedding and first layers are frozen: ``--frozen-layers 3``."""

from __future__ import annotations

import sys
from typing import Any

import pretrain_gpt_swap as program


def add_args(parser: Any) -> Any:
    from megatron.swap.common.flags import add_swap_flags

    parser.add_argument("--frozen-layers", type=int, required=True)
    return add_swap_flags(parser)


def freeze(chunks: Any) -> Any:
    from megatron.training import get_args

    for chunk in chunks:
        for module in (chunk.embedding, *chunk.decoder.layers[: get_args().frozen_layers]):
            module.requires_grad_(False)
    return chunks


if __name__ == "__main__":
    program.prepare(sys.argv)
    from megatron.training import argument_utils, arguments

    parse = arguments.parse_and_validate_args
    arguments.parse_and_validate_args = lambda extra_args_provider: parse(extra_args_provider=add_args)
    make_config = argument_utils.gpt_config_from_args

    def config_that_freezes(args: Any) -> Any:
        config = make_config(args)
        config.pre_wrap_hooks.append(freeze)
        return config

    argument_utils.gpt_config_from_args = config_that_freezes
    program.main()

"""The trainer with changing sequence lengths: ``--lengths 6:64 6:32`` runs six steps of each, in turn."""

import sys
from typing import Any

import pretrain_gpt_swap as program


def add_args(parser: Any) -> Any:
    from megatron.swap.common.flags import add_swap_flags

    parser.add_argument("--lengths", nargs="+", required=True)
    return add_swap_flags(parser)


def varying(get_batch: Any) -> Any:
    def cut(data_iterator: Any, vp_stage: int | None) -> list[Any]:
        from megatron.training import get_args

        args = get_args()
        lengths = [length for item in args.lengths for length in [int(item.split(":")[1])] * int(item.split(":")[0])]
        length = lengths[args.curr_iteration % len(lengths)]
        batch = get_batch(data_iterator, vp_stage)
        return [value[:, :length].contiguous() if hasattr(value, "shape") else value for value in batch]

    return cut


if __name__ == "__main__":
    program.prepare(sys.argv)
    from megatron.training import arguments

    parse = arguments.parse_and_validate_args
    arguments.parse_and_validate_args = lambda extra_args_provider: parse(extra_args_provider=add_args)
    program.get_batch = varying(program.get_batch)
    program.main()

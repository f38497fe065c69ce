"""The trainer, in whose planner one rank has an error: ``--planted solve 1``, as the last flags.

The first word says where: a function that ``megatron.swap.planning`` calls while it makes plans. The second one is the
rank.
"""

import os
import sys
from typing import Any

import pretrain_gpt_swap as program
from megatron.swap.planning import pipeline_planner
from megatron.swap.profiling.recorder import Recorder

PLACES: dict[str, tuple[Any, str]] = {
    "solve": (pipeline_planner, "solve_fractions"),
    "recorder": (Recorder, "stop"),
}


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("planted")


if __name__ == "__main__":
    rank, place = sys.argv.pop(), sys.argv.pop()
    assert sys.argv.pop() == "--planted"
    if os.environ["RANK"] == rank:
        setattr(*PLACES[place], broken)
    program.prepare(sys.argv)
    program.main()

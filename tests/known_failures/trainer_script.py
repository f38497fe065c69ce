"""The trainer, with what tests of known failures add to it.

``--tokens 16 64 64 64``: lengths of the micro-batches, in turn. Each rank also writes what its planner decided behind
each step, a line each, to ``decisions-RANK``.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pretrain_gpt_swap as program


def add_args(parser: Any) -> Any:
    from megatron.swap.arguments import add_swap_args

    parser.add_argument("--tokens", nargs="+", type=int, default=[])
    return add_swap_args(parser)


def cut(get_batch: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``get_batch`` as a function that cuts each micro-batch to its length."""
    lengths: Any = None

    def cut_batch(data_iterator: Any, vp_stage: int | None) -> list[Any]:
        nonlocal lengths
        from megatron.training import get_args

        lengths = lengths or cycle(get_args().tokens or [get_args().seq_length])
        batch, length = get_batch(data_iterator, vp_stage), next(lengths)
        return [value[:, :length].contiguous() if hasattr(value, "shape") else value for value in batch]

    return cut_batch


def write_decisions() -> None:
    from megatron.swap.planning.state_machine import StateMachine

    step_ended = StateMachine.step_ended
    path = Path(f"decisions-{os.environ['RANK']}")

    def noting(machine: StateMachine, step: Any, *numbers: bool) -> Any:
        transition = step_ended(machine, step, *numbers)
        plan = "" if transition.plan is None else hashlib.sha256(repr(transition.plan.classes).encode()).hexdigest()[:8]
        with path.open("a") as file:
            file.write(f"{step.number} {transition.stage.name} {transition.measurement.name} {plan}\n")
        return transition

    StateMachine.step_ended = noting  # type: ignore[method-assign]


if __name__ == "__main__":
    program.prepare(sys.argv)
    from megatron.training import arguments

    parse = arguments.parse_and_validate_args
    arguments.parse_and_validate_args = lambda extra_args_provider: parse(extra_args_provider=add_args)
    program.get_batch = cut(program.get_batch)
    write_decisions()
    program.main()

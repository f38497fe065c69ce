"""Shows the operators of a running layer in C++, once each has run. Without a compiler no layer is followed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

from megatron.swap.native.operator_following import Following, Report, load_operators
from megatron.swap.operators.kinds import Kind, kind_of

F = TypeVar("F", bound=Callable[..., Any])


def sequence_of(operators: Sequence[Any], wanted: Collection[int]) -> object:
    """Return the expected operators of a layer, without those that only make views; ``wanted`` positions are shown."""
    names = [(one._schema.name, one._schema.overload_name) for one in operators]
    return load_operators().Sequence(names, [place in wanted for place in range(len(names))])


def followed(report: Report, sequence: object | None) -> Following:
    """Return a follower that shows all operators, or the wanted operators of ``sequence``, to ``report``."""
    following: Following = load_operators().Following(sequence, report, _resolve)
    return following


def uncompiled(function: F) -> F:
    """Return ``function`` such that Dynamo compiles neither it nor the functions that it calls."""
    # PyTorch's own way is a wrapper, which takes the host longer.
    if not hasattr(eval_frame, "_FrameExecStrategy"):
        return torch.compiler.disable(function)
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


@uncompiled
def _resolve(name: str, overload: str) -> Any:
    """Return the operator as Python calls it; ``None`` if it only makes views."""
    namespace, _, short = name.partition("::")
    operator = getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")
    return None if kind_of(operator) is Kind.IGNORED else operator

"""Shows the operators of a running layer, once each has run: in C++, or by a mode where there is no compiler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.swap.native.operator_following import Following, Report, load_operators
from megatron.swap.nn.operator_kinds import Kind, kind_of


@dataclass(frozen=True)
class OperatorSequence:
    """Operators that a layer is expected to run, without those that only make views.

    Attributes:
        wanted: positions of those that are shown.
        native: the same for C++; ``None``: a mode follows them.
    """

    operators: Sequence[Any]
    wanted: Collection[int]
    native: object | None

    @classmethod
    def of(cls, operators: Sequence[Any], wanted: Collection[int], in_cpp: bool) -> OperatorSequence:
        native = load_operators() if in_cpp else None
        if native is None:
            return cls(operators, wanted, None)
        names = [(one._schema.name, one._schema.overload_name) for one in operators]
        return cls(operators, wanted, native.Sequence(names, [place in wanted for place in range(len(names))]))


def followed(report: Report, sequence: OperatorSequence | None, in_cpp: bool) -> Following:
    """Return what follows operators, and shows all of them, or the wanted ones of ``sequence``, to ``report``.

    Args:
        in_cpp: C++ may see them. A mode does where it is missing.
    """
    native = load_operators() if in_cpp else None
    if native is None:
        return _Mode(report, sequence)
    return native.Following(sequence and sequence.native, report, _resolve)


def uncompiled[F: Callable[..., Any]](function: F) -> F:
    """Return ``function`` such that Dynamo compiles neither it nor what it calls.

    PyTorch's own way, a wrapper, takes the host longer.
    """
    if not hasattr(eval_frame, "_FrameExecStrategy"):
        return torch.compiler.disable(function)
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


@uncompiled
def _resolve(name: str, overload: str) -> Any:
    """Return the operator as Python calls it; ``None``: it only makes views."""
    namespace, _, short = name.partition("::")
    operator = getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")
    return None if kind_of(operator) is Kind.IGNORED else operator


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True
    unseen = torch._C._DisableTorchDispatch
    saw_all = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not hasattr(eval_frame, "_FrameExecStrategy")  # then PyTorch puts its wrapper around the mode

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return that compiled functions stay compiled under this mode."""
        return True

    def __init__(self, report: Report, sequence: OperatorSequence | None) -> None:
        super().__init__()
        self._report = report
        self._sequence = sequence
        self._expected: list[Any] = [] if sequence is None else [*sequence.operators, None]
        self._position = 0
        self._is_other = False

    def begin(self) -> None:
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)

    @property
    def is_as_expected(self) -> bool:
        return not self._is_other and self._position == len(self._expected) - 1

    @uncompiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if self._sequence is None:
            with _with_versions():
                self._report(func, args, kwargs or {}, result)
            return result
        position = self._position
        if self._expected[position] is not func:
            if not self._is_other and kind_of(func) is not Kind.IGNORED:
                self._is_other = True
                self._expected[position] = None  # no operator fits from here on
            return result
        self._position = position + 1
        if position in self._sequence.wanted:
            with _with_versions():
                self._report(position, args, kwargs or {}, result)
        return result


@uncompiled
def _with_versions() -> AbstractContextManager[None]:
    """Return a context in which views share the version counter, by which changes in place are detected.

    Below autograd, where a mode runs, PyTorch leaves out the key that makes them share it.
    """
    without_views = torch._C._dispatch_tls_local_exclude_set()
    views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), without_views - views)

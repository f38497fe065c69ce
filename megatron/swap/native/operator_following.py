"""Shows the operators of a thread to Python, once each has run (``operator_following.cpp``)."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

from torch import _ops

from megatron.swap.common.log import logger
from megatron.swap.native.build import BuildError, Library, load_library

MODULE = "megatron_swap_operators"
LIBRARY = Library(MODULE, ("operator_following.cpp",), ("c10", "torch_cpu", "torch_python"))

Report = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Called with an operator, or its position in a sequence; with its arguments, its options and what it has returned.

In it views share the version counter of their base, as above autograd.
"""
Resolve = Callable[[str, str], Any]
"""Called with the name and the overload of an operator, once for each. Returns what is reported; ``None``: nothing."""


class Following(Protocol):
    """Follows the operators of this thread from ``begin`` to ``end``, below autograd and autocast.

    Attributes, valid after the end:
        saw_all: the operators had no dispatch mode that was not active at the beginning, took no gradient, and none ran
            in other threads.
        is_as_expected: that is so, and all operators of the sequence have run, and no others but unreported ones.
    """

    @property
    def saw_all(self) -> bool: ...
    @property
    def is_as_expected(self) -> bool: ...
    @property
    def unseen(self) -> Callable[[], AbstractContextManager[None]]:
        """A function that makes a context for operators that neither this nor a dispatch mode sees."""
        ...

    def begin(self) -> None: ...
    def end(self) -> None: ...


class OperatorLibrary(Protocol):
    """The interface of the C++ part.

    ``Sequence`` gets names and overloads of operators, and whether each of them is reported. ``Following`` without a
    sequence reports all operators. With one it reports those that are wanted, by their positions, and none from the
    first that differs.
    """

    def Sequence(self, names: Sequence[tuple[str, str]], wanted: Sequence[bool]) -> object: ...
    def Following(self, sequence: object | None, report: Report, resolve: Resolve) -> Following: ...


@functools.cache
def load_operators() -> OperatorLibrary | None:
    """Return the C++ part, and build it if needed.

    ``None``: it cannot be built, which is logged once, or is not wanted (``MEGATRON_SWAP_NATIVE=0``).
    """
    if os.environ.get("MEGATRON_SWAP_NATIVE") == "0":
        return None
    try:
        module = load_library(LIBRARY, _imported)
        _pass_higher_order_operators(module.KEY)
    except (AttributeError, BuildError, ImportError, OSError, RuntimeError) as error:
        logger.warning(
            "without the C++ part that follows operators, swap.activations recomputes whole layers only. %s", error
        )
        return None
    return cast(OperatorLibrary, module)


def _imported(library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(MODULE, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _pass_higher_order_operators(key: Any) -> None:
    """Let operators that take functions pass by ``key``: torch finds their kernels in Python, and knows no fallbacks.

    Raises:
        AttributeError: this torch has them elsewhere.
    """
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)  # of those to come
    for operator in _ops._higher_order_ops.values():
        operator.fallthrough(key)

"""Follows the operators that a layer runs along those that it ran before (``operator_sequence.cpp``)."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from megatron.swap.native.build import BuildError, Library, build, cache_folder

logger = logging.getLogger(__name__)

MODULE = "megatron_swap_operators"
LIBRARY = Library(MODULE, ("operator_sequence.cpp",), ("c10", "torch_cpu", "torch_python"))

Report = Callable[[int, tuple[Any, ...], dict[str, Any], Any], None]
"""Called with the position of an operator, its arguments, its options and what it has returned."""


class Following(Protocol):
    """Follows the operators of this thread from ``begin`` to ``end``.

    Attributes:
        is_as_expected: all operators of the sequence have run, and no others.
    """

    is_as_expected: bool

    def begin(self) -> None: ...
    def end(self) -> None: ...


class Operators(Protocol):
    """The interface of the C++ part.

    ``Sequence`` gets names and overloads of operators, and whether each of them is to be reported. ``Following`` gets
    a sequence, a ``Report``, and a function that says by name and overload whether an operator may run between those of
    the sequence. It reports what autograd calls, as a dispatch mode sees it. ``Unfollowed`` is a context for operators
    that do not count.
    """

    def Sequence(self, names: Sequence[tuple[str, str]], wanted: Sequence[bool]) -> object: ...
    def Following(self, sequence: object, report: Report, is_ignored: Callable[[str, str], bool]) -> Following: ...
    def Unfollowed(self) -> AbstractContextManager[None]: ...


@functools.cache
def load_operators() -> Operators | None:
    """Return the C++ part, and build it if needed.

    ``None``: it cannot be built, which is logged once, or is not wanted (``MEGATRON_SWAP_NATIVE=0``).
    """
    if os.environ.get("MEGATRON_SWAP_NATIVE") == "0":
        return None
    try:
        spec = importlib.util.spec_from_file_location(MODULE, build(cache_folder(), LIBRARY))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (BuildError, ImportError, OSError, RuntimeError) as error:
        logger.warning(
            "swap: without the C++ part that follows operators, layers with recomputed operators take the host longer. "
            "%s", error,
        )  # fmt: skip
        return None
    return cast(Operators, module)

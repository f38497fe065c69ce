"""Shows the operators of a thread to Python, once each has run (``operator_following.cpp``)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import _ops

from megatron.swap.common.log import logger
from megatron.swap.native.build import BuildError, Library, imported, load_library

MODULE = "megatron_swap_operators"
LIBRARY = Library(MODULE, ("operator_following.cpp",), ("c10", "torch_cpu", "torch_python"))

# Called with an operator, or its position in a sequence, and with its arguments, options and result. Within the call
# views share the version counter of their base, as above autograd.
Report = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
# Called once for each operator, with its name and overload. Returns the object to report; None to report nothing.
Resolve = Callable[[str, str], Any]


class Following(Protocol):
    """Follows the operators of this thread from ``begin`` to ``end``, below autograd and autocast."""

    # Both are valid after the end. No operator took a gradient, ran in another thread, or in a mode entered since.
    saw_all: bool
    is_as_expected: bool  # and the sequence ran whole, beside unreported operators alone
    unseen: Callable[[], AbstractContextManager[None]]  # makes a context that neither this object nor a mode sees

    def begin(self) -> None: ...
    def end(self) -> None: ...


@functools.cache
def load_operators() -> Any:
    """Return the C++ part, and build it if needed; ``None`` if it cannot be built, or MEGATRON_SWAP_NATIVE is 0.

    Its ``Sequence`` gets names and overloads of operators, and whether each is reported. Its ``Following`` gets a
    sequence, a ``Report`` and a ``Resolve``. Without a sequence it reports all operators. With one it reports the
    wanted operators by position, and none from the first difference on.
    """
    if os.environ.get("MEGATRON_SWAP_NATIVE") == "0":
        return None
    try:
        module = load_library(LIBRARY, functools.partial(imported, MODULE))
        _pass_higher_order_operators(module.KEY)
    except (AttributeError, BuildError, ImportError, OSError, RuntimeError) as error:
        logger.warning(
            "without the C++ part that follows operators, swap.activations recomputes whole layers only. %s", error
        )
        return None
    return module


def _pass_higher_order_operators(key: Any) -> None:
    # torch finds the kernels of operators that take functions in Python, without fallbacks. They pass by `key`.
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)  # of later operators
    for operator in _ops._higher_order_ops.values():
        operator.fallthrough(key)

"""Chooses the transfer queue: the native one where it can be built, else the Python fallback."""

from __future__ import annotations

from megatron.swap.common.types import SwapError
from megatron.swap.native.base import Core, TransferQueue
from megatron.swap.native.build import load
from megatron.swap.native.python_queue import PythonQueue


class NativeQueue(TransferQueue):
    """A transfer queue whose worker is a C++ thread, which never waits for the interpreter.

    Raises:
        SwapError: the native part cannot be built here; ``queue_class`` does not choose this class then.
    """

    def _make_core(self, name: str, num_in_flight: int, cuda_library: str | None) -> Core:
        native = load()
        if native is None:
            raise SwapError(f"transfer queue {name}: the native part cannot be built here: use queue_class()")
        return native.Core(name, num_in_flight, cuda_library)


def queue_class() -> type[NativeQueue] | type[PythonQueue]:
    """Return the class of transfer queues for this process."""
    return PythonQueue if load() is None else NativeQueue

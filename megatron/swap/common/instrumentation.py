"""Named ranges of the engine's work on a profiler's timeline."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.swap.common.types import format_bytes


class Labelled(Protocol):
    """Subject of a range: a group (``layers.3 mb0``) or a storage (``layers.3/mlp.linear_fc1/0 mb0``)."""

    @property
    def label(self) -> str: ...


Timeline = Callable[[str], AbstractContextManager[object]]
"""Opens a range of a name on a profiler's timeline: NVTX, or torch's ``record_function``."""
Arrival = Callable[[Labelled, Any], None]
"""Called with a storage that was reloaded or recomputed, and the memory that holds its bytes from now on."""


@dataclass
class _Listener:
    timeline: Timeline
    allocated_bytes: Callable[[], int | None] | None
    arrived: Arrival | None
    step: AbstractContextManager[object] = field(default_factory=nullcontext)


class Ranges:
    """Named ranges of the engine's work, passed on to listeners. Without listeners a call costs one check.

    The names are a contract with ``benchmarks/traces``; docs/dev/architecture.md lists them. Micro-batches are numbered
    from 0 in each step, whatever order a pipeline runs them in.
    """

    def __init__(self) -> None:
        self._listeners: list[_Listener] = []
        self._num_forwards: Counter[int] = Counter()
        self._step: int | None = None
        self._backward: tuple[Labelled, int, ExitStack] | None = None
        self._left_open: list[ExitStack] = []

    @property
    def is_on(self) -> bool:
        return bool(self._listeners)

    def start(
        self,
        timeline: Timeline,
        allocated_bytes: Callable[[], int | None] | None = None,
        arrived: Arrival | None = None,
    ) -> None:
        """Pass ranges and marks of ``allocated_bytes`` on to ``timeline``; ``arrived`` gets storages that come back."""
        self._listeners.append(_Listener(timeline, allocated_bytes, arrived))

    def stop(self, timeline: Timeline | None = None) -> None:
        """Stop passing ranges on to ``timeline``; None: to any listener."""
        self._end_backward()
        for listener in [one for one in self._listeners if timeline in (None, one.timeline)]:
            listener.step.__exit__(None, None, None)
            self._listeners.remove(listener)
        if not self._listeners:
            self._step = None

    def step(self, number: int) -> None:
        """End the step before and begin training iteration ``number``; no effect if it has begun."""
        if self._step == number:
            return
        self._step = number  # a range ends on the thread that began it, so every call must come from the same thread
        self._end_backward()
        self._num_forwards.clear()
        for listener in self._listeners:
            listener.step.__exit__(None, None, None)
            listener.step = listener.timeline(f"step {number}")
            listener.step.__enter__()

    def micro_batch(self, layer: int) -> int:
        """Return which of this step's micro-batches ``layer`` runs, or ran last."""
        return max(0, self._num_forwards[layer] - 1)

    def forward(self, layer: int) -> AbstractContextManager[object]:
        if not self._listeners:
            return nullcontext()
        self._num_forwards[layer] += 1
        return self.mark(f"forward layers.{layer} mb{self.micro_batch(layer)}")

    def backward(self, group: Labelled) -> None:
        """Begin the backward range of ``group``, and end that of the group before."""
        if self._listeners:
            self._end_backward()
            stack = ExitStack()
            stack.enter_context(self.mark(f"backward {group.label}"))
            self._backward = group, threading.get_ident(), stack
            self.memory()

    def backward_over(self, group: Labelled) -> None:
        """End the backward range of ``group``: the gradient of its input is there."""
        if self._backward is not None and self._backward[0] is group:
            self._end_backward()
            self.memory()

    def _end_backward(self) -> None:
        if self._backward is not None:
            _, thread, stack = self._backward
            self._backward = None
            if thread == threading.get_ident():
                stack.close()
            else:  # must end on its own thread; freeing it here would end another range
                self._left_open.append(stack)

    def group(self, what: str, group: Labelled, num_bytes: int) -> AbstractContextManager[object]:
        """Return the range of work on a group: ``prefetch layers.3 mb0 412 MiB``."""
        if not self._listeners:
            return nullcontext()
        return self.mark(f"{what} {group.label} {format_bytes(num_bytes)}")

    def storage(self, what: str, storage: Labelled, num_bytes: int | None = None) -> AbstractContextManager[object]:
        """Return the range of work on a storage: ``copy_in layers.3/mlp.linear_fc1/0 mb0 134217728``."""
        if not self._listeners:
            return nullcontext()
        return self.mark(f"{what} {storage.label}" + ("" if num_bytes is None else f" {num_bytes}"))

    def arrived(self, storage: Labelled, memory: Any) -> None:
        """Notify listeners that ``memory`` holds the bytes of ``storage``, or that a copy into it is enqueued."""
        for listener in self._listeners:
            if listener.arrived is not None:
                listener.arrived(storage, memory)

    def memory(self) -> None:
        """Mark the bytes of device memory that are allocated now: ``memory 123456789``."""
        for listener in self._listeners:
            if listener.allocated_bytes is not None and (num_bytes := listener.allocated_bytes()) is not None:
                with listener.timeline(f"memory {num_bytes}"):
                    pass

    def mark(self, name: str) -> AbstractContextManager[object]:
        if not self._listeners:
            return nullcontext()
        if len(self._listeners) == 1:
            return self._listeners[0].timeline(name)
        stack = ExitStack()
        for listener in self._listeners:
            stack.enter_context(listener.timeline(name))
        return stack

"""The host memory budget of one rank: its limit, and the reservations in it."""

from __future__ import annotations

import threading

from megatron.swap.common.types import format_bytes
from megatron.swap.memory.host_memory import HostMemoryError


class HostMemoryBudget:
    """Host memory in named reservations (optimizer state, disk buffers, guard) and a remainder, which is one pool's.

    The remainder may shrink below the pool's reserved bytes. The pool then does not grow until there is room again.
    Any thread may call any method.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes  # all reservations and the remainder
        self._lock = threading.Lock()  # of the reservations: the pool asks on any thread
        self._reserved: dict[str, int] = {}

    def reserve(self, name: str, num_bytes: int = 0) -> Reservation:
        """Reserve ``num_bytes`` under a new ``name``, which appears in error messages. Raises as ``resize``."""
        reservation = Reservation(self, name)
        reservation.resize(num_bytes)
        return reservation

    @property
    def unreserved_bytes(self) -> int:
        with self._lock:
            return self.limit_bytes - sum(self._reserved.values())

    def holders(self) -> str:
        """List the reservations for messages: ``optimizer state 9.00 GiB, guard 448 MiB``, or ``nobody``."""
        with self._lock:
            return _in_words(self._reserved)

    def _set(self, name: str, num_bytes: int) -> None:
        """Change one reservation, under the lock."""
        others = {other: size for other, size in self._reserved.items() if other != name}
        left_bytes = self.limit_bytes - sum(others.values())
        if num_bytes > left_bytes:
            raise HostMemoryError(
                f"{name} takes {format_bytes(num_bytes)} of host memory, but {format_bytes(left_bytes)} of "
                f"{format_bytes(self.limit_bytes)} are left (reserved by others: {_in_words(others)}). "
                "Raise --swap-host-gib."
            )
        self._reserved[name] = num_bytes


def _in_words(reserved: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in reserved.items() if size) or "nobody"


class Reservation:
    """One named part of a budget. ``HostMemoryBudget.reserve`` makes reservations."""

    def __init__(self, budget: HostMemoryBudget, name: str) -> None:
        self.budget = budget
        self.name = name  # of the holder, for error messages

    @property
    def num_bytes(self) -> int:
        with self.budget._lock:
            return self.budget._reserved[self.name]

    def resize(self, num_bytes: int) -> None:
        """Change the reservation to ``num_bytes``, or raise a ``HostMemoryError`` if the limit would be exceeded."""
        with self.budget._lock:
            self.budget._set(self.name, num_bytes)

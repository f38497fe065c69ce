"""One storage's life, from the moment autograd saves it until the graph lets go of it.

::

    RESIDENT --swap out--> LEAVING --release--> OUT --swap in--> RETURNING --arrive--> BACK
        |                     |                  ^                                      |
        +-------> STAYS <-----+                  +-----------drop after last unpack-----+

Where an allocation fails the guard makes RESIDENT, LEAVING and RETURNING OUT.

Whoever holds a packed tensor holds its handle; when the last one goes, the handle's finalizer frees its slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from megatron.swap.devices.base import Event, Stream
from megatron.swap.tiers.base import Slot
from megatron.swap.types import Site, SwapError

if TYPE_CHECKING:
    from megatron.swap.group import Group
    from megatron.swap.guard import OomGuard


class State(Enum):
    """Where a storage's bytes are."""

    RESIDENT = auto()
    """On the device; nothing has been copied."""
    LEAVING = auto()
    """On the device; the copy out is enqueued."""
    STAYS = auto()
    """On the device until the graph lets go of it: somebody else holds it too, or backward came before release."""
    OUT = auto()
    """In the tier only."""
    RETURNING = auto()
    """A device buffer exists and the copy into it is enqueued."""
    BACK = auto()
    """In that buffer, and the compute stream has waited for it."""


ALLOWED: dict[State, frozenset[State]] = {
    State.RESIDENT: frozenset({State.LEAVING, State.STAYS, State.OUT}),
    State.LEAVING: frozenset({State.OUT, State.STAYS}),
    State.STAYS: frozenset(),
    State.OUT: frozenset({State.RETURNING}),
    State.RETURNING: frozenset({State.BACK, State.OUT}),
    State.BACK: frozenset({State.OUT}),
}


Orphans = deque[tuple[torch.UntypedStorage, Event]]
"""Storages whose handle is gone while a copy still reads or writes them."""


class StateError(SwapError):
    """A transition that the life of a storage does not have: a fault in this package, never in its use."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor on the storage and the version it had when autograd saved it.

    It shares its version counter with the tensor that was saved, so that a later in-place change shows.
    """

    tensor: torch.Tensor
    version: int

    def changed(self) -> bool:
        return self.tensor._version != self.version

    def check(self, what: str) -> None:
        """Raise as autograd does where no hooks stand in its way."""
        if self.changed():
            raise RuntimeError(
                f"{what}: one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: it is at version {self.tensor._version}, autograd saved it at version {self.version}. The "
                "same model fails without swapping."
            )


def alias_of(tensor: torch.Tensor) -> Alias:
    """``tensor`` as it is now."""
    alias = tensor.detach()
    return Alias(alias, alias._version)


class Handle:
    """One storage that autograd saved, once, however many views of it were saved.

    Attributes:
        site: where it was saved first.
        num_bytes: size of the whole storage.
        storage: the device memory, while there is any that belongs to this handle.
        aliases: one a saved tensor, until release; each is one more reference to ``storage``.
        stream: the stream that produced it; its block goes back to that stream's pool.
        num_packed, num_unpacked: saved tensors on it, and how many of them were asked back since it came back.
        orphans: where the storage goes if the handle dies in the middle of a copy.
        is_kept: the policy left it on the device; there is a handle for the guard's sake.
        guard, offer: who may take the storage when memory is short, and under which number; 0: nobody may now.
    """

    __slots__ = (
        "__weakref__",
        "aliases",
        "checksum",
        "group",
        "guard",
        "in_event",
        "in_fence",
        "is_kept",
        "num_bytes",
        "num_packed",
        "num_unpacked",
        "offer",
        "orphans",
        "out_event",
        "site",
        "slot",
        "state",
        "storage",
        "stream",
    )

    def __init__(
        self, site: Site, group: Group, storage: torch.UntypedStorage, stream: Stream, orphans: Orphans
    ) -> None:
        self.orphans = orphans
        self.slot: Slot | None = None
        self.site = site
        self.group = group
        self.num_bytes = storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        self.stream = stream
        self.state = State.RESIDENT
        self.aliases: list[Alias] = []
        self.out_event: Event | None = None
        self.in_event: Event | None = None
        self.in_fence = 0
        self.num_packed = 0
        self.num_unpacked = 0
        self.checksum: torch.Tensor | None = None
        self.is_kept = False
        self.guard: OomGuard | None = None
        self.offer = 0

    def move_to(self, state: State) -> None:
        """Enter ``state``.

        Raises:
            StateError: names the site, the current state and the states allowed from it.
        """
        if state not in ALLOWED[self.state]:
            allowed = ", ".join(sorted(s.name for s in ALLOWED[self.state])) or "none"
            raise StateError(f"{self.site}: cannot go from {self.state.name} to {state.name}; allowed: {allowed}.")
        self.state = state

    @property
    def label(self) -> str:
        return f"{self.site} mb{self.group.micro_batch}"

    def changed(self) -> bool:
        """Whether anybody wrote into the storage, or emptied it, after it was saved."""
        assert self.storage is not None
        return self.storage.nbytes() != self.num_bytes or any(alias.changed() for alias in self.aliases)

    def held_elsewhere(self) -> bool:
        """Whether anybody but this handle refers to the storage, so that dropping it would free nothing."""
        assert self.storage is not None
        return torch._C._storage_Use_Count(self.storage._cdata) > self.num_owners

    @property
    def num_owners(self) -> int:
        """References to the storage that are this handle's: the storage object, and each alias, unless it was brought
        back: then those are on the one that was saved, and only tell whether that was changed."""
        return 1 if self.state in (State.RETURNING, State.BACK) else 1 + len(self.aliases)

    def bytes_view(self) -> torch.Tensor:
        """The device memory as one uint8 tensor of ``num_bytes``."""
        assert self.storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def pending_event(self) -> Event | None:
        """The event of a copy that may still touch ``storage`` and that the compute stream has not waited for."""
        if self.state is State.RETURNING:
            return self.in_event
        return self.out_event if self.state in (State.LEAVING, State.STAYS) else None

    def free_slot(self) -> None:
        """Give the tier's room back; a read that is still under way is passed on as the fence."""
        if self.slot is not None:
            self.slot.free(self.in_fence)
            self.slot = None

    def __del__(self) -> None:
        # The graph let go of every tensor that was saved on this storage. This can run inside any other call of the
        # manager, so it only notes things: a slot's ``free`` is made for that, and so is the deque.
        if self.guard is not None:
            self.guard.claim(self)
        self.free_slot()
        event = self.pending_event()
        if event is not None and self.storage is not None:
            self.orphans.append((self.storage, event))

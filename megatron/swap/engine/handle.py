"""The states of one saved storage, until the graph lets go of it; and the group of a layer's storages.

::

    RESIDENT --offload--> OFFLOADING --release--> OFFLOADED --reload--> RELOADING --first unpack--> RELOADED
        |                     |                       ^                                                |
        +-------> KEPT <------+                       +--------------- drop after last unpack ---------+

Where an allocation fails the guard evicts: RESIDENT, OFFLOADING and RELOADING become OFFLOADED.

Packed tensors in the graph hold the handle. When the last one is freed, the handle's finalizer frees its slot.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import torch

from megatron.swap.common.types import Action, GroupKey, LayerPosition, Site, SwapError
from megatron.swap.devices.base import Event, Stream
from megatron.swap.engine.decision import Decision
from megatron.swap.memory.tiers.base import Slot


class StorageState(Enum):
    """Where a storage's bytes are."""

    RESIDENT = auto()
    """On the device; nothing has been copied."""
    OFFLOADING = auto()
    """On the device; the copy to the tier is enqueued."""
    KEPT = auto()
    """On the device until the graph frees it. Its offload was given up: others refer to it, or backward came first."""
    OFFLOADED = auto()
    """In the tier; the handle has no device memory. After the last unpack only the unpacked tensor has some."""
    RELOADING = auto()
    """A device buffer exists and the copy into it is enqueued."""
    RELOADED = auto()
    """In that buffer, and the compute stream has waited for it."""


ALLOWED: dict[StorageState, frozenset[StorageState]] = {
    StorageState.RESIDENT: frozenset({StorageState.OFFLOADING, StorageState.KEPT, StorageState.OFFLOADED}),
    StorageState.OFFLOADING: frozenset({StorageState.OFFLOADED, StorageState.KEPT}),
    StorageState.KEPT: frozenset(),
    StorageState.OFFLOADED: frozenset({StorageState.RELOADING}),
    StorageState.RELOADING: frozenset({StorageState.RELOADED, StorageState.OFFLOADED}),
    StorageState.RELOADED: frozenset({StorageState.OFFLOADED}),
}


Orphans = deque[tuple[torch.UntypedStorage, Event]]
"""Storages whose handle was freed while a copy still reads or writes them, and the event of that copy."""


class StateError(SwapError):
    """A transition that a storage does not have: a fault in this package, never in its use."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor on the storage and the version it had when autograd saved it.

    It shares its version counter with the tensor that was saved, so that a later in-place change shows.
    """

    tensor: torch.Tensor
    version: int

    def changed(self) -> bool:
        """Whether somebody wrote to the tensor since."""
        return self.tensor._version != self.version

    def check(self, what: str) -> None:
        """As ``check_version``."""
        check_version(self.tensor, self.version, what)


def check_version(tensor: torch.Tensor, version: int, what: str) -> None:
    """Raise as autograd does without hooks, if ``tensor`` was changed in place since it had ``version``.

    Raises:
        RuntimeError: names ``what`` and both versions.
    """
    if tensor._version != version:
        raise RuntimeError(
            f"{what}: one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: it is at version {tensor._version}, autograd saved it at version {version}. The "
            "same model fails without swapping."
        )


def alias_of(tensor: torch.Tensor) -> Alias:
    """Return an alias of ``tensor`` as it is now."""
    alias = tensor.detach()
    return Alias(alias, alias._version)


class Evictor(Protocol):
    """Who may evict a storage from the device when memory is short: the out-of-memory guard."""

    def reacquire(self, handle: Handle) -> StorageState | None:
        """From now on do not evict ``handle``. Return the state that it had if it was evicted, else ``None``."""
        ...


class Handle:
    """One storage that autograd saved, once, however many views of it were saved.

    Attributes:
        site: where it was saved first.
        group: of the layer that saved it; of the last one, if it is kept.
        decision: what was decided when it was saved first.
        num_bytes: size of the whole storage.
        storage: the device memory, while there is any that belongs to this handle.
        aliases: one for each saved tensor, until release; each is one more reference to ``storage``.
        stream: the stream that produced it; its block goes back to that stream's pool.
        slot: its bytes in the tier, from the copy out until it is freed.
        out_event, in_event: passed when the copy to the tier, and the copy back, are through.
        in_fence: of the last copy back (``fences.py``).
        num_packed: saved tensors on it.
        num_unpacked: how many of them were unpacked since it was reloaded.
        checksum: of its bytes, with ``--swap-verify``.
        orphans: where the storage goes if the handle is freed in the middle of a copy.
        guard, offer: who may evict the storage when memory is short, and under which number; 0: nobody may now.
    """

    __slots__ = (
        "__weakref__",
        "aliases",
        "checksum",
        "decision",
        "group",
        "guard",
        "in_event",
        "in_fence",
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
        self,
        site: Site,
        group: Group,
        storage: torch.UntypedStorage,
        stream: Stream,
        orphans: Orphans,
        decision: Decision,
    ) -> None:
        self.orphans = orphans
        self.slot: Slot | None = None
        self.decision = decision
        self.site = site
        self.group = group
        self.num_bytes = storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        self.stream = stream
        self.state = StorageState.RESIDENT
        self.aliases: list[Alias] = []
        # None until that copy is enqueued; ``Any``, because whoever uses one knows from the state that it exists.
        self.out_event: Event | Any = None
        self.in_event: Event | Any = None
        self.in_fence = 0
        self.num_packed = 0
        self.num_unpacked = 0
        self.checksum: torch.Tensor | None = None
        self.guard: Evictor | None = None
        self.offer = 0

    def move_to(self, state: StorageState) -> None:
        """Enter ``state``.

        Raises:
            StateError: names the site, the current state and the states allowed from it.
        """
        if state not in ALLOWED[self.state]:
            allowed = ", ".join(sorted(s.name for s in ALLOWED[self.state])) or "none"
            raise StateError(f"{self.site}: cannot go from {self.state.name} to {state.name}; allowed: {allowed}.")
        self.state = state

    @property
    def is_kept_by_decision(self) -> bool:
        """Whether the decision was to keep it: it has a handle only so that the guard can evict it.

        Not the state KEPT, which ends an offload that was begun.
        """
        return self.decision.action is Action.KEEP

    @property
    def label(self) -> str:
        """Its name in ranges and recordings."""
        return f"{self.site} mb{self.group.micro_batch}"

    def changed(self) -> bool:
        """Whether somebody wrote to the storage, or emptied it, after it was saved."""
        assert self.storage is not None
        return self.storage.nbytes() != self.num_bytes or any(alias.changed() for alias in self.aliases)

    def has_external_refs(self) -> bool:
        """Whether others refer to the storage, so that dropping this handle's references would free nothing."""
        assert self.storage is not None
        return torch._C._storage_Use_Count(self.storage._cdata) > self.num_owners

    @property
    def num_owners(self) -> int:
        """How many references to the storage are this handle's.

        Those are the storage object and each alias. The aliases of a reloaded storage do not count: they belong to the
        storage that was saved, and only show whether that was changed.
        """
        return 1 if self.state in (StorageState.RELOADING, StorageState.RELOADED) else 1 + len(self.aliases)

    def bytes_view(self) -> torch.Tensor:
        """Return the device memory as one uint8 tensor, [num_bytes]."""
        assert self.storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def pending_event(self) -> Event | None:
        """Return the event of a copy that may still use ``storage`` and that the compute stream has not waited for."""
        if self.state is StorageState.RELOADING:
            return self.in_event
        return self.out_event if self.state in (StorageState.OFFLOADING, StorageState.KEPT) else None

    def free_slot(self) -> None:
        """Give the slot back to the tier; its fence names the read that may still be under way."""
        if self.slot is not None:
            self.slot.free(self.in_fence)
            self.slot = None

    def __del__(self) -> None:
        # The graph let go of every tensor that was saved on this storage. This can run inside any other call of the
        # engine, so it only notes things: a slot's ``free`` is made for that, and so is the deque.
        if self.guard is not None:
            self.guard.reacquire(self)
        self.free_slot()
        event = self.pending_event()
        if event is not None and self.storage is not None:
            self.orphans.append((self.storage, event))


class ForwardPass:
    """One forward of one model chunk: its groups are the ones that one stretch of backward goes through.

    Attributes:
        kept: layer and bytes that it kept, in the order of forward.
        begun_bytes: bytes that were kept for groups whose backward has begun.
        over_bytes: the part of that whose backward has ended, so that its memory is free.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[int, int]] = []
        self.begun_bytes = 0
        self.over_bytes = 0

    def begin_backward(self, group: Group) -> None:
        """Backward enters ``group``: the backward of those before has ended."""
        self.over_bytes = self.begun_bytes
        self.begun_bytes += group.kept_bytes


class Group:
    """The handles of one layer and micro-batch, in the order in which they were saved.

    The group refers to its handles weakly: they live as long as the graph holds a tensor packed on them, and that
    decides when their memory goes back.
    """

    def __init__(self, key: GroupKey, position: LayerPosition, sequence: int, forward_pass: ForwardPass) -> None:
        self.key = key
        self.micro_batch = key.micro_batch
        """Number of the micro-batch in its step, for ranges, where a profiler numbers them."""
        self.position = position
        self.forward_pass = forward_pass
        self.sequence = sequence
        """Position in the order of forwards since the graph was last empty."""
        self.num_bytes = 0
        """Bytes of its handles that are not kept."""
        self.kept_bytes = 0
        """Bytes that its layer saved and that were kept on the device."""
        self.prefetched_bytes = 0
        """Bytes that are on the device for its backward, before that begins: reloaded, or their offload cancelled."""
        self.backward_begun = False
        self.prefetch_evicted = False
        """Whether storages that were prefetched for it were evicted: it is not prefetched again."""
        self._handles: list[weakref.ref[Handle]] = []

    @property
    def label(self) -> str:
        """Its name in ranges and recordings."""
        return f"layers.{self.key.layer} mb{self.micro_batch}"

    def add(self, handle: Handle) -> None:
        """``handle`` joins; the bytes of one that is kept count once it is evicted."""
        self._handles.append(weakref.ref(handle))
        if not handle.is_kept_by_decision:
            self.num_bytes += handle.num_bytes

    def has(self, handle: Handle) -> bool:
        """Whether ``handle`` joined before: several views of one storage count once."""
        return any(reference() is handle for reference in reversed(self._handles))

    def in_backward_order(self) -> Iterator[Handle]:
        """Yield the handles that are still alive, last saved first: backward asks for them in that order."""
        for reference in reversed(self._handles):
            handle = reference()
            if handle is not None:
                yield handle

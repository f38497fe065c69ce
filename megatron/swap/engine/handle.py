"""The states of one saved storage until the graph frees it, and the group of a layer's storages.

::

    RESIDENT --offload--> OFFLOADING --release--> OFFLOADED --reload--> RELOADING --first unpack--> RELOADED
        |                     |                       ^                                                |
        +-------> KEPT <------+                       +--------------- drop after last unpack ---------+

When an allocation fails, the guard evicts: RESIDENT, OFFLOADING and RELOADING become OFFLOADED.

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
from megatron.swap.devices.base import Event, Stream, bytes_of
from megatron.swap.engine.decision import Decision
from megatron.swap.memory.tiers.base import Slot


class StorageState(Enum):
    """Place of a storage's bytes."""

    RESIDENT = auto()  # on the device; nothing has been copied
    OFFLOADING = auto()  # on the device; the copy to the tier is enqueued
    KEPT = auto()  # on the device until the graph frees the storage: never offloaded, or the offload was cancelled
    # In the tier; the handle holds no device memory. Tensors that autograd unpacked may still hold a reloaded buffer.
    OFFLOADED = auto()
    RELOADING = auto()  # a device buffer exists and the copy into it is enqueued
    RELOADED = auto()  # in the device buffer; the compute stream has waited for the copy


ALLOWED: dict[StorageState, frozenset[StorageState]] = {
    StorageState.RESIDENT: frozenset({StorageState.OFFLOADING, StorageState.KEPT, StorageState.OFFLOADED}),
    StorageState.OFFLOADING: frozenset({StorageState.OFFLOADED, StorageState.KEPT}),
    StorageState.KEPT: frozenset(),
    StorageState.OFFLOADED: frozenset({StorageState.RELOADING}),
    StorageState.RELOADING: frozenset({StorageState.RELOADED, StorageState.OFFLOADED}),
    StorageState.RELOADED: frozenset({StorageState.OFFLOADED}),
}


# Storages whose handle was freed during a copy, each with the copy's event.
Orphans = deque[tuple[torch.UntypedStorage, Event]]


class StateError(SwapError):
    """A transition that is not allowed: a bug in this package, never a usage error."""


@dataclass(slots=True)  # frozen, it would take three times as long to make, once or twice for every saved tensor
class Alias:
    """An alias of a saved tensor, and the version that the tensor had when autograd saved it."""

    # Shares the saved tensor's version counter, so that later in-place changes are detected.
    tensor: torch.Tensor
    version: int

    def changed(self) -> bool:
        """Whether the tensor was changed in place after it was saved."""
        return self.tensor._version != self.version

    def counts_with(self, tensor: torch.Tensor) -> bool:
        """Whether an in-place change of ``tensor``, which has the same storage, would be detected here."""
        # Views and detached tensors share a counter. Results of `unsafe_chunk`, `unsafe_split` and `.data` have their
        # own.
        version = tensor._version
        if self.tensor._version != version:
            return False
        set_version = torch._C._autograd._unsafe_set_version_counter
        set_version((tensor,), (version + 1,))
        try:
            return self.tensor._version != version
        finally:
            set_version((tensor,), (version,))

    def check(self, what: str) -> None:
        """Raise if the tensor was changed, as ``check_version`` does."""
        check_version(self.tensor, self.version, what)


def check_version(tensor: torch.Tensor, version: int, what: str) -> None:
    """Raise a ``RuntimeError`` if ``tensor`` was changed in place since ``version``, as autograd does without hooks."""
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
    """Evicts storages from the device when memory is short: the out-of-memory guard."""

    def reacquire(self, handle: Handle) -> StorageState | None: ...


class Handle:
    """One storage that autograd saved, with all saved views of it."""

    __slots__ = (
        "__weakref__", "aliases", "checksum", "decision", "group", "guard", "in_event", "in_fence", "num_bytes",
        "num_packed", "num_unpacked", "offer", "orphans", "out_event", "site", "slot", "state", "storage", "stream",
    )  # fmt: skip

    def __init__(
        self, site: Site, group: Group, storage: torch.UntypedStorage, stream: Stream, orphans: Orphans,
        decision: Decision,
    ) -> None:  # fmt: skip
        self.orphans = orphans  # receives the storage if the handle is freed during a copy
        self.slot: Slot | None = None  # the bytes in the tier, from the start of the offload until they are freed
        self.decision = decision  # when the storage was saved first; it stays if the offload is cancelled
        self.site = site  # saved the storage first
        self.group = group  # saved the storage first; of a kept storage, saved it last
        self.num_bytes = storage.nbytes()  # of the whole storage
        self.storage: torch.UntypedStorage | None = storage  # device memory, if any
        # The stream that was current at the save; after a reload, the stream of the buffer. The block returns to its
        # pool.
        self.stream = stream
        self.state = StorageState.RESIDENT
        self.aliases: list[Alias] = []  # one for each saved tensor, until release; each holds a reference to `storage`
        # None until the copy is enqueued. ``Any``: the state shows whether the event exists.
        self.out_event: Event | Any = None
        self.in_event: Event | Any = None
        self.in_fence = 0  # of the last reload
        self.num_packed = 0  # saved tensors on the storage
        self.num_unpacked = 0  # unpacked since the reload
        self.checksum: torch.Tensor | None = None  # with --swap-verify
        self.guard: Evictor | None = None
        self.offer = 0  # number of the current offer to the guard; 0 if there is none

    def move_to(self, state: StorageState) -> None:
        """Enter ``state``, or raise a ``StateError`` if the current state does not allow it."""
        if state not in ALLOWED[self.state]:
            allowed = ", ".join(sorted(s.name for s in ALLOWED[self.state])) or "none"
            raise StateError(f"{self.site}: cannot go from {self.state.name} to {state.name}; allowed: {allowed}.")
        self.state = state

    @property
    def is_kept_by_decision(self) -> bool:
        """Whether the decision was KEEP: the handle exists only so that the guard can evict the storage."""
        # Not the state KEPT, in which a cancelled offload ends.
        return self.decision.action is Action.KEEP

    @property
    def label(self) -> str:
        """The handle's name in ranges and recordings."""
        return f"{self.site} mb{self.group.micro_batch}"

    def changed(self) -> bool:
        """Whether the storage was changed in place or emptied after it was saved."""
        assert self.storage is not None
        for alias in self.aliases:  # no generator: this is asked several times for every storage
            if alias.tensor._version != alias.version:
                return True
        return self.storage.nbytes() != self.num_bytes

    def has_external_refs(self) -> bool:
        """Whether the storage has references besides this handle's, so that dropping these would free nothing."""
        assert self.storage is not None
        return torch._C._storage_Use_Count(self.storage._cdata) > self.num_owners

    @property
    def num_owners(self) -> int:
        """Number of references to the storage that this handle holds: the storage object and each alias."""
        # The aliases of a reloaded storage, where the guard evicted it, are on the memory before: they detect changes.
        return 1 if self.state in (StorageState.RELOADING, StorageState.RELOADED) else 1 + len(self.aliases)

    def bytes_view(self) -> torch.Tensor:
        """Return the device memory as one uint8 tensor, [num_bytes]."""
        assert self.storage is not None
        return bytes_of(self.storage)

    def pending_event(self) -> Event | None:
        """Return the event of a copy that may still use ``storage``, or None once the compute stream waits for it."""
        if self.state is StorageState.RELOADING:
            return self.in_event
        return self.out_event if self.state in (StorageState.OFFLOADING, StorageState.KEPT) else None

    def free_slot(self) -> None:
        """Free the slot; its fence names the read that may still be in flight."""
        if self.slot is not None:
            self.slot.free(self.in_fence)
            self.slot = None

    def __del__(self) -> None:
        # The graph freed every tensor that was saved on this storage. A finalizer can run inside any other call of the
        # engine, so it only appends to queues: a slot's ``free`` and the deque allow that.
        if self.guard is not None:
            self.guard.reacquire(self)
        self.free_slot()
        event = self.pending_event()
        if event is not None and self.storage is not None:
            self.orphans.append((self.storage, event))


class ForwardPass:
    """One forward of one model chunk, whose groups backward goes through without interruption."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, int]] = []  # (layer, bytes it kept), in the order of forward
        # Counted storages by address. A storage that several layers save counts in the first: the first layer's
        # backward comes last and frees it.
        self.counted: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.begun_bytes = 0  # kept for groups whose backward has begun
        self.over_bytes = 0  # kept for groups whose backward has ended: this memory is free

    def begin_backward(self, group: Group) -> None:
        """Note that backward enters ``group``: the backward of all earlier groups has ended."""
        self.over_bytes = self.begun_bytes
        self.begun_bytes += group.kept_bytes


class Group:
    """The handles of one layer and micro-batch, in the order in which they were saved."""

    def __init__(self, key: GroupKey, position: LayerPosition, sequence: int, forward_pass: ForwardPass) -> None:
        self.key = key
        self.micro_batch = key.micro_batch  # within its step where a profiler numbers them, as in `key` otherwise
        self.position = position
        self.forward_pass = forward_pass
        self.sequence = sequence  # position in the order of forwards since the graph was last empty
        self.num_bytes = 0  # of storages that were decided to be offloaded, or were evicted
        self.kept_bytes = 0  # saved by the layer and kept on the device
        self.prefetched_bytes = 0  # reloaded, or offload cancelled, ahead of this group's backward
        self.backward_begun = False
        self.prefetch_evicted = False  # prefetched storages were evicted: do not prefetch the group again
        # Weak: a handle lives, and holds its memory, as long as the graph holds a tensor packed on it, or while the
        # `OffloadQueue` holds it for release.
        self._handles: list[weakref.ref[Handle]] = []

    @property
    def label(self) -> str:
        """The group's name in ranges and recordings."""
        return f"layers.{self.key.layer} mb{self.micro_batch}"

    def add(self, handle: Handle) -> None:
        """Add ``handle``. A kept storage adds to ``num_bytes`` only once it is evicted."""
        self._handles.append(weakref.ref(handle))
        if not handle.is_kept_by_decision:
            self.num_bytes += handle.num_bytes

    def has(self, handle: Handle) -> bool:
        """Whether ``handle`` was added before: several views of one storage count once."""
        return any(reference() is handle for reference in reversed(self._handles))

    def in_backward_order(self) -> Iterator[Handle]:
        """Yield the living handles, last saved first: the order in which backward needs them."""
        for reference in reversed(self._handles):
            handle = reference()
            if handle is not None:
                yield handle

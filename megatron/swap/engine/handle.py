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

    RESIDENT = auto()
    """The bytes are on the device; nothing has been copied."""
    OFFLOADING = auto()
    """The bytes are on the device; the copy to the tier is enqueued."""
    KEPT = auto()
    """The bytes stay on the device until the graph frees them: the offload was cancelled."""
    OFFLOADED = auto()
    """The bytes are in the tier; the handle holds no device memory. After the last unpack, unpacked tensors hold it."""
    RELOADING = auto()
    """A device buffer exists and the copy into it is enqueued."""
    RELOADED = auto()
    """The bytes are in the device buffer, and the compute stream has waited for the copy."""


ALLOWED: dict[StorageState, frozenset[StorageState]] = {
    StorageState.RESIDENT: frozenset({StorageState.OFFLOADING, StorageState.KEPT, StorageState.OFFLOADED}),
    StorageState.OFFLOADING: frozenset({StorageState.OFFLOADED, StorageState.KEPT}),
    StorageState.KEPT: frozenset(),
    StorageState.OFFLOADED: frozenset({StorageState.RELOADING}),
    StorageState.RELOADING: frozenset({StorageState.RELOADED, StorageState.OFFLOADED}),
    StorageState.RELOADED: frozenset({StorageState.OFFLOADED}),
}


Orphans = deque[tuple[torch.UntypedStorage, Event]]
"""Storages whose handle was freed during a copy, each with the event of that copy."""


class StateError(SwapError):
    """A transition that is not allowed: a bug in this package, never a usage error."""


@dataclass(slots=True)  # frozen, it would take three times as long to make, once or twice for every saved tensor
class Alias:
    """An alias of a saved tensor, and the version that the tensor had when autograd saved it.

    The alias shares the saved tensor's version counter, so that later in-place changes are detected.
    """

    tensor: torch.Tensor
    version: int

    def changed(self) -> bool:
        """Whether the tensor was changed in place after it was saved."""
        return self.tensor._version != self.version

    def counts_with(self, tensor: torch.Tensor) -> bool:
        """Whether an in-place change of ``tensor``, which has the same storage, would be detected here.

        Views and detached tensors count changes together. ``unsafe_chunk``, ``unsafe_split`` and ``.data`` give tensors
        that count alone.
        """
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
    """Raise if ``tensor`` was changed in place since ``version``, as autograd does without hooks.

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
    """Evicts storages from the device when memory is short: the out-of-memory guard."""

    def reacquire(self, handle: Handle) -> StorageState | None:
        """Protect ``handle`` from eviction. Return its state before it was evicted; ``None``: it was not evicted."""
        ...


class Handle:
    """One storage that autograd saved, with all saved views of it.

    Attributes:
        site: the site that saved the storage first.
        group: the group that saved the storage first; for a kept storage, the one that saved it last.
        decision: the decision when the storage was saved first. It stays when the offload is cancelled (state KEPT).
        num_bytes: size of the whole storage.
        storage: the device memory, while this handle holds any.
        aliases: one for each saved tensor, until release; each is one more reference to ``storage``.
        stream: the stream that was current when the storage was saved; after a reload, the one that the buffer was
            allocated on. The block returns to that stream's pool.
        slot: the bytes in the tier, from the start of the offload until they are freed.
        out_event, in_event: pass when the copy to the tier, and the copy to the device, have ended.
        in_fence: fence of the last reload (``fences.py``).
        num_packed: number of saved tensors on the storage.
        num_unpacked: how many of them were unpacked since the reload.
        checksum: checksum of the bytes, with ``--swap-verify``.
        orphans: receives the storage if the handle is freed during a copy.
        guard, offer: the guard, and the number of the current offer to it; 0: no offer, so no eviction.
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
        # None until the copy is enqueued. ``Any``: the state shows whether the event exists.
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
        """Whether the decision was KEEP: the handle exists only so that the guard can evict the storage.

        This is not the state KEPT, which a cancelled offload ends in.
        """
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
        """Number of references to the storage that this handle holds: the storage object and each alias.

        The aliases of a reloaded storage do not count: they belong to the saved storage, to detect changes.
        """
        return 1 if self.state in (StorageState.RELOADING, StorageState.RELOADED) else 1 + len(self.aliases)

    def bytes_view(self) -> torch.Tensor:
        """Return the device memory as one uint8 tensor, [num_bytes]."""
        assert self.storage is not None
        return bytes_of(self.storage)

    def pending_event(self) -> Event | None:
        """Return the event of a copy that may still use ``storage``; ``None`` once the compute stream waits for it."""
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
    """One forward of one model chunk, whose groups backward goes through without interruption.

    Attributes:
        kept: each layer's number and the bytes it kept, in the order of forward.
        counted: the storages among them, by address. One that several layers save counts in the first: it takes memory
            once, and the first layer's backward, which comes last, frees it.
        begun_bytes: bytes kept for groups whose backward has begun.
        over_bytes: bytes kept for groups whose backward has ended: this memory is free.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[int, int]] = []
        self.counted: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.begun_bytes = 0
        self.over_bytes = 0

    def begin_backward(self, group: Group) -> None:
        """Note that backward enters ``group``: the backward of all earlier groups has ended."""
        self.over_bytes = self.begun_bytes
        self.begun_bytes += group.kept_bytes


class Group:
    """The handles of one layer and micro-batch, in the order in which they were saved.

    The group refers to its handles weakly. A handle lives, and holds its memory, as long as the graph holds a tensor
    packed on it, or while it awaits release in the ``OffloadQueue``.
    """

    def __init__(self, key: GroupKey, position: LayerPosition, sequence: int, forward_pass: ForwardPass) -> None:
        self.key = key
        self.micro_batch = key.micro_batch
        """Number of the micro-batch within its step where a profiler numbers them, else as in ``key``."""
        self.position = position
        self.forward_pass = forward_pass
        self.sequence = sequence
        """Position in the order of forwards since the graph was last empty."""
        self.num_bytes = 0
        """Bytes of storages that were decided to be offloaded, or that were evicted."""
        self.kept_bytes = 0
        """Bytes that the layer saved and that are kept on the device."""
        self.prefetched_bytes = 0
        """Bytes that were reloaded, or whose offload was cancelled, ahead of this group's backward."""
        self.backward_begun = False
        self.prefetch_evicted = False
        """Whether prefetched storages of the group were evicted: the group is not prefetched again."""
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

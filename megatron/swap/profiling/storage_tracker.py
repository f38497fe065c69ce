"""Tracks storages until they are freed, each with a record."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

Reference = weakref.ref[torch.UntypedStorage]


class TrackedStorage[Record]:
    """A storage on the device with its record."""

    __slots__ = ("num_aliases", "num_bytes", "record", "reference")

    def __init__(self, record: Record, reference: Reference, num_bytes: int) -> None:
        self.record = record  # the caller's record of the storage
        self.reference = reference  # weak reference to the storage
        self.num_bytes = num_bytes  # bytes of the storage; when last looked at, since its owner may resize it
        self.num_aliases = 0  # tensors on the storage that the autograd graph holds

    def has_external_refs(self) -> bool:
        """Whether anyone but the autograd graph refers to the storage."""
        storage = self.reference()
        ours = 1 + self.num_aliases  # the storage's Python object, and one reference for each saved tensor
        return storage is not None and torch._C._storage_Use_Count(storage._cdata) > ours


class StorageTracker[Record]:
    """The tracked storages of one recording. ``freed`` is called with each storage that is about to be freed."""

    def __init__(self, freed: Callable[[TrackedStorage[Record]], None]) -> None:
        self._freed = freed
        self._tracked: dict[int, TrackedStorage[Record]] = {}

    def get(self, storage: torch.UntypedStorage) -> TrackedStorage[Record] | None:
        """Return the entry of ``storage``, or None if it is not tracked."""
        entry = self._tracked.get(storage._cdata)
        return entry if entry is not None and entry.reference() is storage else None

    def track(self, record: Record, storage: torch.UntypedStorage) -> TrackedStorage[Record]:
        """Track ``storage`` until it is freed."""
        address, tracked = storage._cdata, self._tracked

        def freed(reference: Reference) -> None:
            if tracked is self._tracked:
                self._freed(entry)
            if tracked.get(address) is entry:
                del tracked[address]

        # The weak reference dies with the storage itself: torch keeps its Python object alive as long.
        entry = tracked[address] = TrackedStorage(record, weakref.ref(storage, freed), storage.nbytes())
        return entry

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._tracked.values())

    def forget(self) -> None:
        """Track no storage any longer."""
        self._tracked = {}

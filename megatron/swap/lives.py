"""Storages that are followed until they are freed, each with a record."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

Reference = weakref.ref[torch.UntypedStorage]


class Life[Record]:
    """Device memory that holds a storage's bytes. ``num_aliases``: tensors on it that stand in the graph."""

    __slots__ = ("num_aliases", "num_bytes", "record", "reference")

    def __init__(self, record: Record, reference: Reference, num_bytes: int) -> None:
        self.record = record
        self.reference = reference
        self.num_bytes = num_bytes
        self.num_aliases = 0

    def held_elsewhere(self) -> bool:
        """Whether anybody but the graph refers to it."""
        storage = self.reference()
        ours = 1 + self.num_aliases  # the storage's Python object, and a tensor for each that was saved
        return storage is not None and torch._C._storage_Use_Count(storage._cdata) > ours


class Lives[Record]:
    """Those of one recording.

    Args:
        freed: told of each whose memory is about to be freed.
    """

    def __init__(self, freed: Callable[[Life[Record]], None]) -> None:
        self._freed = freed
        self._lives: dict[int, Life[Record]] = {}

    def get(self, storage: torch.UntypedStorage) -> Life[Record] | None:
        """The life of ``storage``; ``None``: it is not followed."""
        life = self._lives.get(storage._cdata)
        return life if life is not None and life.reference() is storage else None

    def follow(self, record: Record, storage: torch.UntypedStorage) -> Life[Record]:
        """From now on. The reference dies with the storage itself, not with its Python object."""
        address, lives = storage._cdata, self._lives

        def freed(reference: Reference) -> None:
            if lives is self._lives:
                self._freed(life)
            if lives.get(address) is life:
                del lives[address]

        life = lives[address] = Life(record, weakref.ref(storage, freed), storage.nbytes())
        return life

    def forget(self) -> None:
        """Follow none of them any longer."""
        self._lives = {}

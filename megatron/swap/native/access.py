"""Storages that refuse access, so that a read of released memory raises an error instead of crashing."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from megatron.swap.native.build import load


class StorageAccess:
    """Refuses and allows access to storages. Without the C++ part a read of an empty storage gets a null pointer.

    To release the bytes: ``resize_(0)``, refuse. To restore them: allow, ``resize_(n)``, copy. torch itself refuses a
    *new* view of an emptied storage, with another message.
    """

    def __init__(self) -> None:
        self._native = load()
        self._refused: set[int] = set()  # addresses of StorageImpls

    def refuse(self, storage: torch.UntypedStorage, message: str) -> None:
        """Let every access to the address of ``storage`` raise a RuntimeError with ``message``."""
        self._refused.add(storage._cdata)
        if self._native is not None:
            self._native.refuse(storage._cdata, message)

    def allow(self, storage: torch.UntypedStorage) -> None:
        """End ``refuse``. ``resize_`` needs this first."""
        self._refused.discard(storage._cdata)
        if self._native is not None:
            self._native.allow(storage._cdata)

    def is_refused(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``refuse`` was called for ``storage``, with the C++ part or without."""
        return storage._cdata in self._refused

    def forget(self, address: int) -> None:
        """Forget the freed storage whose ``StorageImpl`` was at ``address``: the address may be reused."""
        self._refused.discard(address)

    def on_use(self, key: int, reload: Callable[[int], bool]) -> Callable[[], None]:
        """Let C++ operators call ``reload`` with addresses, which returns if it was its own. Return an undo."""
        if self._native is None:
            return lambda: None
        self._native.add_reload(key, reload)
        return functools.partial(self._native.remove_reload, key)

    def in_use(self, storage: torch.UntypedStorage) -> bool:
        """Whether a C++ operator that has declared ``storage`` has not ended."""
        return self._native is not None and self._native.in_use(storage._cdata)


@functools.cache
def storage_access() -> StorageAccess:
    return StorageAccess()

"""Storages that refuse to be looked at: an error for whoever reads memory that is not there, instead of a crash."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from megatron.swap.native.build import load


class StorageAccess:
    """Without the native part ``refuse`` does nothing: whoever reads an empty storage then finds a null pointer.

    Args:
        native: use the native part, where there is one.
    """

    def __init__(self, *, native: bool = True) -> None:
        self._native = load() if native else None
        self._refused: set[int] = set()
        """Addresses of ``StorageImpl``s."""

    @property
    def refuses(self) -> bool:
        """Whether it can."""
        return self._native is not None

    def refuse(self, storage: torch.UntypedStorage, message: str) -> None:
        """From now on every access to the address of ``storage`` raises a RuntimeError with ``message``."""
        self._refused.add(storage._cdata)
        if self._native is not None:
            self._native.refuse(storage._cdata, message)

    def allow(self, storage: torch.UntypedStorage) -> None:
        """No longer; ``resize_`` needs that."""
        self._refused.discard(storage._cdata)
        if self._native is not None:
            self._native.allow(storage._cdata)

    def is_refused(self, storage: torch.UntypedStorage) -> bool:
        """Whether anybody in this process has it refuse; also where ``refuse`` can do nothing."""
        return storage._cdata in self._refused

    def forget(self, address: int) -> None:
        """The storage whose ``StorageImpl`` was there is gone; another one may come."""
        self._refused.discard(address)

    def on_use(self, key: int, bring_back: Callable[[int], bool]) -> Callable[[], None]:
        """C++ operators that declare what they use (``operator.h``) have it brought back.

        Args:
            key: of the caller.
            bring_back: called with a storage's address; whether it was the caller's to bring back.

        Returns: what ends it.
        """
        if self._native is None:
            return lambda: None
        self._native.add_bring_back(key, bring_back)
        return functools.partial(self._native.remove_bring_back, key)

    def in_use(self, storage: torch.UntypedStorage) -> bool:
        """Whether a C++ operator has declared it and not ended."""
        return self._native is not None and self._native.in_use(storage._cdata)


@functools.cache
def storage_access() -> StorageAccess:
    """The one of this process."""
    return StorageAccess()

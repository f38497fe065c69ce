"""Storages that are offloaded and reloaded one by one: their states, and their lifetimes until a copy is over.

::

    on the device --offload--> OFFLOADING --copied--> OFFLOADED --reload--> RELOADING --copied--> on the device
          ^                        |                      ^                     |
          +-------- recall --------+                      +------ cancel -------+

Views and aliases share their storage and stay valid. An offloaded storage is empty, and refuses access.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

import torch

from megatron.swap.common.log import logger
from megatron.swap.common.types import SwapError, format_bytes
from megatron.swap.memory.host_pool import HostPool, Lease
from megatron.swap.native.access import StorageAccess
from megatron.swap.tensor_swap.direct_transfers import DirectTransfer, DirectTransfers
from megatron.swap.tensor_swap.transfers import Direction, Transfer, Transfers


class TransferState(Enum):
    """Place of the bytes of a ``SwappedStorage``."""

    OFFLOADING = auto()  # on the device; the copy to the host is queued or under way
    OFFLOADED = auto()  # in host memory; the storage is empty
    RELOADING = auto()  # in host memory; the storage has memory again, and the copy is queued or under way


class SwappedStorage:
    """A storage that is offloaded, or being offloaded or reloaded."""

    __slots__ = ("lease", "num_bytes", "reference", "state", "transfer")

    def __init__(self, storage: torch.UntypedStorage, lease: Lease, died: Callable[[Any], None]) -> None:
        self.num_bytes = storage.nbytes()
        # Weak, so it dies with the storage's last tensor. None once the storage is on the device again.
        self.reference: weakref.ref[torch.UntypedStorage] | None = weakref.ref(storage, died)
        self.lease = lease
        self.state = TransferState.OFFLOADING
        # The copy that is queued or under way; it keeps the storage alive. None if OFFLOADED.
        self.transfer: Transfer | DirectTransfer | None = None


class StorageMover:
    """Moves the storages of one device, on any thread. A storage in the wanted state already stays as it is."""

    def __init__(
        self, device: torch.device, pool: HostPool, transfers: Transfers | DirectTransfers, access: StorageAccess
    ) -> None:
        self._device = device
        self._pool = pool
        self._transfers = transfers
        self._access = access
        self._lock = threading.RLock()  # re-entered: an allocation may finish offloads, `reload_all` begins reloads
        self._entries: dict[int, SwappedStorage] = {}
        # Both in the order of their copies in the queue.
        self._offloading: OrderedDict[int, SwappedStorage] = OrderedDict()
        self._reloading: OrderedDict[int, SwappedStorage] = OrderedDict()
        # Copies without an entry that may still use their host memory.
        self._draining: deque[Transfer | DirectTransfer] = deque()
        self._failures: list[Exception] = []
        self.out_bytes = self.in_bytes = 0  # a copy counts when it is over
        self.num_passive = 0  # reloads that an operation had to wait for
        self.num_recalled = 0  # storages that were needed before they were offloaded

    # ------------------------------------------------------------------ state

    @property
    def is_idle(self) -> bool:
        """Whether all storages are on the device, and no copy is under way."""
        return not self._entries and not self._draining

    def state(self, storage: torch.UntypedStorage) -> TransferState | None:
        """Return the state of ``storage``; ``None`` if it is on the device."""
        entry = self._entries.get(storage._cdata)
        return None if entry is None else entry.state

    # ------------------------------------------------------------------ offload and reload

    def offload(self, storage: torch.UntypedStorage, *, ahead: bool) -> None:
        """Begin to offload, ``ahead`` of queued copies or behind. Raises an error without room, or while in use."""
        with self._lock:
            entry = self._entries.get(storage._cdata)
            if entry is not None and entry.state is TransferState.RELOADING:
                self._finish_reload(entry)
                entry = None
            if entry is None:
                if self._access.in_use(storage):
                    raise SwapError("a tensor to offload is in use: a C++ operator declared it and has not ended")
                self._reap()
                entry = self._new_entry(storage)
                self._entries[storage._cdata] = entry
            elif entry.transfer is None or not ahead or not entry.transfer.erase():
                return  # it is offloaded already, or being offloaded
            assert entry.transfer is not None
            # From here on a write would be lost, so any access that the dispatcher does not see is refused. The copy
            # runs by address.
            self._access.refuse(storage, _refusal(entry))
            try:
                is_ahead = entry.transfer.begin(ahead=ahead)
            except BaseException:  # the storage has its bytes; the lease is lost, since a copy may write to it
                self._forget(entry, storage)
                raise
            self._offloading[storage._cdata] = entry
            self._offloading.move_to_end(storage._cdata, last=not is_ahead)

    def begin_reload(self, storage: torch.UntypedStorage) -> None:
        """Begin to reload behind queued copies, or recall. Raises a ``torch.OutOfMemoryError`` without room."""
        with self._lock:
            entry = self._entries.get(storage._cdata)
            if entry is not None and entry.state is TransferState.OFFLOADING:
                self._recall(entry)
            elif entry is not None and entry.state is TransferState.OFFLOADED:
                self._begin_reload(entry, storage, ahead=False)

    def require(self, storage: torch.UntypedStorage) -> None:
        """Reload ``storage`` ahead of queued copies, for the caller's stream. If that fails it stays offloaded."""
        with self._lock:
            entry = self._entries.get(storage._cdata)
            if entry is None:
                return
            if entry.state is TransferState.OFFLOADING:
                self._recall(entry)
                return
            self.num_passive += 1
            if entry.state is TransferState.OFFLOADED:
                self._begin_reload(entry, storage, ahead=True)
            elif entry.transfer is not None and entry.transfer.erase():
                entry.transfer.begin(ahead=True)
            self._finish_reload(entry)

    def reload(self, address: int) -> bool:
        """Reload the storage whose ``StorageImpl`` is at ``address``. Return False if it is unknown."""
        entry = self._entries.get(address)
        storage = None if entry is None or entry.reference is None else entry.reference()
        if storage is not None:
            self.require(storage)
        return storage is not None

    def cancel(self, storage: torch.UntypedStorage) -> None:
        """Withdraw a copy that has not begun."""
        with self._lock:
            entry = self._entries.get(storage._cdata)
            if entry is None or entry.transfer is None or not entry.transfer.erase():
                return
            if entry.state is TransferState.OFFLOADING:
                self._forget(entry, storage)
                entry.lease.free()
            else:
                self._empty(entry, storage)

    def reload_all(self) -> None:
        """Reload everything, and wait. Raises as ``require``."""
        with self._lock:
            storages = [entry.reference() for entry in list(self._entries.values()) if entry.reference is not None]
            for storage in storages:
                if storage is not None:
                    self.begin_reload(storage)
            for entry in list(self._reloading.values()):
                self._finish_reload(entry)

    # ------------------------------------------------------------------ wait

    def poll(self) -> None:
        """Finish the copies that are over. Never waits. ``wait`` and ``wait_offloaded`` raise the failures."""
        with self._lock:
            for under_way, step in ((self._offloading, self._finish_offload), (self._reloading, self._finish_reload)):
                while under_way:
                    entry = next(iter(under_way.values()))
                    assert entry.transfer is not None
                    if not entry.transfer.is_done():
                        break
                    self._try(partial(step, entry))
            self._reap()

    def wait_offloaded(self) -> None:
        """Wait for all offloads. Raises the error of a failed copy, whose storage stays on the device."""
        self._finish_offloads()
        self._raise_first()

    def wait(self) -> None:
        """Wait until no copy is queued or under way. Raises the error of a failed copy, when all are over."""
        self._finish_offloads()
        for entry in list(self._reloading.values()):
            self._try(partial(self._finish_reload, entry))
        with self._lock:
            while self._draining:
                self._finish(self._draining.popleft())
        self._raise_first()

    def _finish_offloads(self) -> None:
        for entry in list(self._offloading.values()):
            self._try(partial(self._finish_offload, entry))

    def _try(self, step: Callable[[], None]) -> None:
        try:
            with self._lock:
                step()
        except Exception as error:
            self._failures.append(error)

    def _raise_first(self) -> None:
        if self._failures:
            first, self._failures = self._failures[0], []
            raise first

    # ------------------------------------------------------------------ transitions, all under the lock

    def _new_entry(self, storage: torch.UntypedStorage) -> SwappedStorage:
        address, entries, access = storage._cdata, self._entries, self._access
        lease = self._pool.lease(storage.nbytes())
        try:
            transfer = self._transfers.transfer(Direction.OUT, storage, lease)
        except BaseException:
            lease.free()
            raise

        def died(_: Any) -> None:
            # The storage's last tensor died while offloaded. No lock: this may run on any thread, also in a garbage
            # collection while this thread holds the mover's lock.
            if entries.get(address) is entry:
                del entries[address]
            access.forget(address)
            lease.free()

        entry = SwappedStorage(storage, lease, died)
        entry.transfer = transfer
        return entry

    def _finish_offload(self, entry: SwappedStorage) -> None:
        """OFFLOADING -> OFFLOADED: wait for the copy. If it failed, the storage stays on the device."""
        if entry.state is not TransferState.OFFLOADING or entry.transfer is None:
            return
        storage = entry.transfer.storage
        try:
            entry.transfer.wait()  # the host waits: the copy's source is released next
            if storage.nbytes() != entry.num_bytes:
                raise SwapError("a tensor was resized while it was offloaded: it stays as it is now")
        except Exception:
            self._forget(entry, storage)
            entry.lease.free()
            raise
        del self._offloading[storage._cdata]
        self.out_bytes += entry.num_bytes
        self._empty(entry, storage)

    def _empty(self, entry: SwappedStorage, storage: torch.UntypedStorage) -> None:
        """-> OFFLOADED: release the device memory, and refuse access."""
        entry.transfer = None
        entry.state = TransferState.OFFLOADED
        self._reloading.pop(storage._cdata, None)
        self._access.allow(storage)
        if self._device.type == "cpu":  # so that a premature read finds NaN
            ctypes.memset(storage.data_ptr(), 0xFF, entry.num_bytes)
        storage.resize_(0)
        self._access.refuse(storage, _refusal(entry))

    def _recall(self, entry: SwappedStorage) -> None:
        """OFFLOADING -> on the device. A copy under way is discarded, since the storage may change now."""
        transfer = entry.transfer
        assert transfer is not None
        self.num_recalled += 1
        self._forget(entry, transfer.storage)
        if transfer.erase():
            entry.lease.free()
        else:
            self._draining.append(transfer)

    def _begin_reload(self, entry: SwappedStorage, storage: torch.UntypedStorage, *, ahead: bool) -> None:
        """OFFLOADED -> RELOADING: allocate memory, and refuse access until the copy is over."""
        self._access.allow(storage)
        try:
            self._allocate(storage, entry.num_bytes)
            transfer = self._transfers.transfer(Direction.IN, storage, entry.lease)
        finally:
            self._access.refuse(storage, _refusal(entry))
        is_ahead = transfer.begin(ahead=ahead)
        entry.transfer, entry.state = transfer, TransferState.RELOADING
        self._reloading[storage._cdata] = entry
        self._reloading.move_to_end(storage._cdata, last=not is_ahead)

    def _allocate(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        try:
            storage.resize_(num_bytes)
        except torch.OutOfMemoryError:
            if not self._offloading:
                raise
            self._finish_offloads()  # their end releases device memory
            storage.resize_(num_bytes)

    def _finish_reload(self, entry: SwappedStorage) -> None:
        """RELOADING -> on the device, in the order of the caller's stream. If the copy failed, -> OFFLOADED."""
        if entry.state is not TransferState.RELOADING or entry.transfer is None:
            return
        transfer = entry.transfer
        try:
            transfer.join()  # the caller's stream waits; the host only until the copy is enqueued
        except Exception:
            self._empty(entry, transfer.storage)
            raise
        self.in_bytes += entry.num_bytes
        self._forget(entry, transfer.storage)
        self._draining.append(transfer)  # on a GPU the copy may still read the host memory
        self._reap()

    def _forget(self, entry: SwappedStorage, storage: torch.UntypedStorage) -> None:
        """-> on the device. Drop all references: a cycle would keep the storage alive until a garbage collection."""
        for kept in (self._entries, self._offloading, self._reloading):
            kept.pop(storage._cdata, None)
        entry.transfer = entry.reference = None
        self._access.allow(storage)

    def _reap(self) -> None:
        """Release the host memory of the draining copies that are over."""
        while self._draining and self._draining[0].is_done():
            self._finish(self._draining.popleft())

    def _finish(self, transfer: Transfer | DirectTransfer) -> None:
        try:
            transfer.wait()
        except Exception as error:  # of a recalled copy, whose bytes are not needed; all others CUDA raises again
            logger.debug("a copy of %d bytes that nobody waited for failed: %s", transfer.lease.nbytes, error)
        transfer.lease.free()


def _refusal(entry: SwappedStorage) -> str:
    return (
        f"this tensor ({format_bytes(entry.num_bytes)}) is offloaded: a TensorSwap moved it to host memory. "
        "Operations of PyTorch reload it; other code that reads it has to call resident(tensor) first."
    )

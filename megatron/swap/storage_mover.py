"""Storages that leave the device and come back, one by one: their states, and who holds what until a copy is over.

::

    on the device --leave--> LEAVING --copy is over--> OUT --begin_return--> RETURNING --arrive--> on the device
          ^                     |                       ^                        |
          +------- recall ------+                       +------ cancel ----------+

Nothing here knows of tensors: views and aliases share their storage and stay valid. One that is out is empty, and
whoever asks for its address gets an error (where ``StorageAccess`` can do that).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

import torch

from megatron.swap.host_pool import HostPool, Lease
from megatron.swap.native.access import StorageAccess
from megatron.swap.transfers import Direction, Transfer, Transfers
from megatron.swap.types import SwapError, format_bytes

logger = logging.getLogger(__name__)


class State(Enum):
    """Where a storage's bytes are, if it is not simply on the device."""

    LEAVING = auto()
    """On the device; its copy out is queued or under way."""
    OUT = auto()
    """In host memory; the storage is empty."""
    RETURNING = auto()
    """In host memory; the storage has memory again, and the copy into it is queued or under way."""


class Away:
    """A storage that is not simply on the device.

    Attributes:
        reference: dies with the storage's last tensor. ``None``: it is on the device again.
        transfer: under way; it holds the storage. ``None``: it is out.
    """

    __slots__ = ("lease", "num_bytes", "reference", "state", "transfer")

    def __init__(self, storage: torch.UntypedStorage, lease: Lease, died: Callable[[Any], None]) -> None:
        self.num_bytes = storage.nbytes()
        self.reference: weakref.ref[torch.UntypedStorage] | None = weakref.ref(storage, died)
        self.lease = lease
        self.state = State.LEAVING
        self.transfer: Transfer | None = None


class StorageMover:
    """Moves the storages of one device. Methods that take a storage do nothing where there is nothing to do.

    Any thread may call it: autograd runs a backward on others.

    Attributes:
        out_bytes, in_bytes: copied and counted when a copy is over.
        num_passive: how often somebody had to wait for a storage.
        num_recalled: storages that were wanted again before they had left.
    """

    def __init__(self, device: torch.device, pool: HostPool, transfers: Transfers, access: StorageAccess) -> None:
        self._device = device
        self._pool = pool
        self._transfers = transfers
        self._access = access
        self._lock = threading.RLock()
        self._away: dict[int, Away] = {}
        self._leaving: OrderedDict[int, Away] = OrderedDict()
        """As their copies stand in the queue."""
        self._returning: OrderedDict[int, Away] = OrderedDict()
        self._finishing: deque[Transfer] = deque()
        """Over for everybody but the host memory that they read or write."""
        self._failures: list[Exception] = []
        self.out_bytes = self.in_bytes = self.num_passive = self.num_recalled = 0

    # ------------------------------------------------------------------ asked

    @property
    def is_idle(self) -> bool:
        """Whether everything is simply on the device, and no copy under way."""
        return not self._away and not self._finishing

    def state(self, storage: torch.UntypedStorage) -> State | None:
        """``None``: it is simply on the device."""
        away = self._away.get(storage._cdata)
        return None if away is None else away.state

    # ------------------------------------------------------------------ told

    def leave(self, storage: torch.UntypedStorage, *, ahead: bool) -> None:
        """Begin to swap out, ``ahead`` of what is queued or behind it; what is on its way back arrives first.

        Raises:
            HostMemoryError: there is none for it.
            SwapError: a C++ operator uses it.
        """
        with self._lock:
            away = self._away.get(storage._cdata)
            if away is not None and away.state is State.RETURNING:
                self._arrive(away)
                away = None
            if away is None:
                if self._access.in_use(storage):
                    raise SwapError("a tensor that is to leave is in use: a C++ operator declared it and has not ended")
                self._reap()
                away = self._new_away(storage)
                self._away[storage._cdata] = away
            elif away.transfer is None or not ahead or not away.transfer.erase():
                return  # it is out, or on its way
            assert away.transfer is not None
            # From here on a change would be lost: whoever is not seen gets an error. The copy itself runs by address.
            self._access.refuse(storage, _refusal(away))
            away.transfer.begin(ahead=ahead)
            self._leaving[storage._cdata] = away
            self._leaving.move_to_end(storage._cdata, last=not ahead)

    def begin_return(self, storage: torch.UntypedStorage) -> None:
        """Give it memory, and begin to swap in, behind what is queued; what has not left yet is called back.

        Raises:
            torch.OutOfMemoryError: it is out as before.
        """
        with self._lock:
            away = self._away.get(storage._cdata)
            if away is not None and away.state is State.LEAVING:
                self._recall(away)
            elif away is not None and away.state is State.OUT:
                self._begin_return(away, storage, ahead=False)

    def need(self, storage: torch.UntypedStorage) -> None:
        """What the caller's stream does from now on finds it on the device; it comes ahead of what is queued.

        Raises:
            torch.OutOfMemoryError, or what made the copy fail: it is out as before.
        """
        with self._lock:
            away = self._away.get(storage._cdata)
            if away is None:
                return
            if away.state is State.LEAVING:
                self._recall(away)
                return
            self.num_passive += 1
            if away.state is State.OUT:
                self._begin_return(away, storage, ahead=True)
            elif away.transfer is not None and away.transfer.erase():
                away.transfer.begin(ahead=True)
            self._arrive(away)

    def bring_back(self, address: int) -> bool:
        """A C++ operator needs the storage whose ``StorageImpl`` is at ``address``; whether it was ours.

        Raises: as ``need``.
        """
        away = self._away.get(address)
        storage = None if away is None or away.reference is None else away.reference()
        if storage is not None:
            self.need(storage)
        return storage is not None

    def cancel(self, storage: torch.UntypedStorage) -> None:
        """Take back a copy that has not begun."""
        with self._lock:
            away = self._away.get(storage._cdata)
            if away is None or away.transfer is None or not away.transfer.erase():
                return
            if away.state is State.LEAVING:
                self._forget(away, storage)
                away.lease.free()
            else:
                self._empty(away, storage)

    def return_all(self) -> None:
        """Everything that is out or on its way is back on the device. Raises: as ``need``."""
        with self._lock:
            storages = [away.reference() for away in list(self._away.values()) if away.reference is not None]
            for storage in storages:
                if storage is not None:
                    self.begin_return(storage)
            for away in list(self._returning.values()):
                self._arrive(away)

    # ------------------------------------------------------------------ waited for

    def see_to_copies(self) -> None:
        """Take note of copies that are over, the memory of what has left above all; waits for none.

        Failures are kept for who waits.
        """
        with self._lock:
            for under_way, step in ((self._leaving, self._has_left), (self._returning, self._arrive)):
                while under_way:
                    away = next(iter(under_way.values()))
                    assert away.transfer is not None
                    if not away.transfer.is_done():
                        break
                    self._try(partial(step, away))
            self._reap()

    def wait_left(self) -> None:
        """Until all that leaves has left.

        Raises: what made a copy fail, when all are over; those storages stayed on the device.
        """
        for away in list(self._leaving.values()):
            self._try(partial(self._has_left, away))
        self._raise_first()

    def wait(self) -> None:
        """Until nothing is on its way. Raises: what made a copy fail, when all are over."""
        for away in list(self._leaving.values()):
            self._try(partial(self._has_left, away))
        for away in list(self._returning.values()):
            self._try(partial(self._arrive, away))
        with self._lock:
            while self._finishing:
                self._finish(self._finishing.popleft())
        self._raise_first()

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

    def _new_away(self, storage: torch.UntypedStorage) -> Away:
        address, away_of, access = storage._cdata, self._away, self._access
        lease = self._pool.lease(storage.nbytes())
        try:
            transfer = self._transfers.transfer(Direction.OUT, storage, lease)
        except BaseException:
            lease.free()
            raise

        def died(_: Any) -> None:
            # Its last tensor is gone while it was out. Runs wherever that was, maybe in a garbage collection under our
            # own lock: takes none.
            if away_of.get(address) is away:
                del away_of[address]
            access.forget(address)
            lease.free()

        away = Away(storage, lease, died)
        away.transfer = transfer
        return away

    def _has_left(self, away: Away) -> None:
        """LEAVING -> OUT, when the copy is over; on the device, if it failed."""
        if away.state is not State.LEAVING or away.transfer is None:
            return
        storage = away.transfer.storage
        try:
            away.transfer.wait()
            if storage.nbytes() != away.num_bytes:
                raise SwapError("a tensor was resized while it left: it stays as it is now")
        except Exception:
            self._forget(away, storage)
            away.lease.free()
            raise
        del self._leaving[storage._cdata]
        self.out_bytes += away.num_bytes
        self._empty(away, storage)

    def _empty(self, away: Away, storage: torch.UntypedStorage) -> None:
        """-> OUT: no memory on the device, and nobody may look for it there."""
        away.transfer = None
        away.state = State.OUT
        self._returning.pop(storage._cdata, None)
        self._access.allow(storage)
        if self._device.type == "cpu":  # no device, but where tests run: what reads it too early is to find no numbers
            ctypes.memset(storage.data_ptr(), 0xFF, away.num_bytes)
        storage.resize_(0)
        self._access.refuse(storage, _refusal(away))

    def _recall(self, away: Away) -> None:
        """LEAVING -> on the device: what is copied nevertheless counts for nothing, since it may be changed now."""
        transfer = away.transfer
        assert transfer is not None
        self.num_recalled += 1
        self._forget(away, transfer.storage)
        if transfer.erase():
            away.lease.free()
        else:
            self._finishing.append(transfer)

    def _begin_return(self, away: Away, storage: torch.UntypedStorage, *, ahead: bool) -> None:
        """OUT -> RETURNING. Until it arrives there is nothing in its memory: still nobody may look."""
        self._access.allow(storage)
        try:
            self._allocate(storage, away.num_bytes)
            transfer = self._transfers.transfer(Direction.IN, storage, away.lease)
        finally:
            self._access.refuse(storage, _refusal(away))
        transfer.begin(ahead=ahead)
        away.transfer, away.state = transfer, State.RETURNING
        self._returning[storage._cdata] = away
        self._returning.move_to_end(storage._cdata, last=not ahead)

    def _allocate(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        try:
            storage.resize_(num_bytes)
        except torch.OutOfMemoryError:
            if not self._leaving:
                raise
            for leaving in list(self._leaving.values()):  # whose memory will do
                self._try(partial(self._has_left, leaving))
            storage.resize_(num_bytes)

    def _arrive(self, away: Away) -> None:
        """RETURNING -> on the device, in the order of the caller's stream; out as before, if the copy failed."""
        if away.state is not State.RETURNING or away.transfer is None:
            return
        transfer = away.transfer
        try:
            transfer.join()
        except Exception:
            self._empty(away, transfer.storage)
            raise
        self.in_bytes += away.num_bytes
        self._forget(away, transfer.storage)
        self._finishing.append(transfer)  # on a GPU the host memory is still being read
        self._reap()

    def _forget(self, away: Away, storage: torch.UntypedStorage) -> None:
        """It is simply on the device, and nothing of ours holds it: a circle of references would, until collected."""
        for kept in (self._away, self._leaving, self._returning):
            kept.pop(storage._cdata, None)
        away.transfer = away.reference = None
        self._access.allow(storage)

    def _reap(self) -> None:
        """Give back the host memory of copies that nobody waits for and that are over."""
        while self._finishing and self._finishing[0].is_done():
            self._finish(self._finishing.popleft())

    def _finish(self, transfer: Transfer) -> None:
        try:
            transfer.wait()
        except Exception as error:  # of a copy out: it was called back, nobody wants it. Else CUDA tells it again
            logger.debug("a copy of %d bytes that nobody waited for failed: %s", transfer.lease.nbytes, error)
        transfer.lease.free()


def _refusal(away: Away) -> str:
    return (
        f"the memory of this tensor ({format_bytes(away.num_bytes)}) is out: a TensorSwap moved it to host memory. "
        "Operations of PyTorch bring it back; whatever else reads it has to ask for resident(tensor) first."
    )

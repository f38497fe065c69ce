"""Swapping tensor by tensor, for models of your own and for tensors that autograd does not save.

::

    with TensorSwap() as swap:
        swap.swap_out(a)                  # now, ahead of queued copies
        swap.queue_swap_out(b, c)         # behind it
        swap.wait_swapped_out()           # their device memory is free
        ...
        swap.queue_prefetch(a, b)         # recorded
        swap.start_prefetches()           # the copies begin
        c.sum()                           # reloads c by itself, ahead of a and b

A tensor's *storage* is moved: views and aliases share it, and so stay valid. An offloaded storage is empty. Every
operation that the dispatcher sees (on this thread, and in the backward that it starts) reloads its tensors first.
Before other uses, such as the kernels of TransformerEngine and other extensions, call ``resident``; without it the read
raises an error.

``docs/reference/python.md`` describes the whole interface.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megatron.swap.common.types import GIB, MIB, MOST, SwapError, UsageError, format_bytes, is_within
from megatron.swap.memory.host_memory import HostMemoryError
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.native.access import storage_access
from megatron.swap.native.build import load
from megatron.swap.native.transfer_queue import TransferQueue
from megatron.swap.tensor_swap.direct_transfers import DirectTransfers
from megatron.swap.tensor_swap.mover import StorageMover, TransferState
from megatron.swap.tensor_swap.operations import Addresses, Operations, storage_of
from megatron.swap.tensor_swap.transfers import Transfers

SLAB_BYTES = 64 * MIB  # the pool reserves host memory in slabs of this size, and several at once for larger tensors


@dataclass(frozen=True)
class TensorStats:
    """Counters of one ``TensorSwap`` since its start."""

    out_bytes: int  # copied to the host, without recalled tensors
    in_bytes: int  # copied back
    num_passive: int  # reloads that an operation had to wait for
    num_recalled: int  # offloads cancelled because an operation used the tensor before the copy was over
    host_bytes: int  # host memory in use now
    host_peak_bytes: int  # and the most so far


class TensorSwap:
    """Offloads and reloads single tensors of one device, between ``open`` and ``close``, or in a ``with``.

    One thread at a time may use it, beside the threads on which autograd runs a backward.

    Args:
        host_gib: most pinned host memory, in GiB.
        device: the device of the tensors; by default the current GPU, or the CPU where there is none.
        queue: class of the transfer queues. Where the default cannot be built, copies begin at once instead.

    Raises a ``UsageError`` if ``host_gib`` or ``device`` cannot work.
    """

    def __init__(
        self, host_gib: float, device: torch.device | str | None = None, queue: type[TransferQueue] | None = None
    ) -> None:
        if not is_within(MIB / GIB, host_gib, MOST):
            raise UsageError(f"TensorSwap(host_gib={host_gib!r}): a number from {MIB / GIB:.4f} (1 MiB) on is expected")
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = _with_index(torch.device(default if device is None else device))
        if self.device.type not in ("cuda", "cpu"):
            raise UsageError(f"TensorSwap(device={self.device}): cuda or cpu is expected")
        self._host_gib = host_gib
        self._make_queue = TransferQueue if queue is None and load() else queue
        self._access = storage_access()
        self._wanted: list[weakref.ref[torch.UntypedStorage]] = []
        self._modes: ExitStack | None = None

    # ------------------------------------------------------------------ open and close

    def open(self) -> TensorSwap:
        """Accept tensors from now on, and return this object. Raises a ``SwapError`` if it is open already."""
        if self._modes is not None:
            raise SwapError("TensorSwap is open already: close it first, or make another one")
        on_gpu = self.device.type == "cuda"
        index = self.device.index if on_gpu else None
        self._pool = HostPool(limit=int(self._host_gib * GIB), pinned=on_gpu, slab_bytes=SLAB_BYTES, device=index)
        make_queue = self._make_queue
        self._transfers = Transfers(self.device, make_queue) if make_queue else DirectTransfers(self.device)
        self._mover = StorageMover(self.device, self._pool, self._transfers, self._access)
        self._process = os.getpid()
        self._operations = Operations(self._before_use)
        self._modes = ExitStack()
        self._modes.enter_context(Addresses(self._before_use))
        self._modes.enter_context(self._operations)
        self._modes.callback(self._access.on_use(id(self), self._mover.reload))
        self._accepts = True
        return self

    def close(self) -> None:
        """Stop, reload everything, and release host memory. A second call does nothing.

        Raises:
            SwapError: on another thread than ``open``, or before another mode that was entered later.
            torch.OutOfMemoryError: not all tensors fit the device. Then, and after a failed reload, the TensorSwap is
                still open, takes no more tensors, and may be closed again.
            Exception: the error of a failed offload. The TensorSwap is closed, and every tensor is on the device.
        """
        if self._modes is None:
            return
        if _get_current_dispatch_mode() is not self._operations:
            raise SwapError(
                "TensorSwap must be closed on the thread that opened it, and after all that was opened later (another "
                "one, or any other dispatch mode)"
            )
        failure: Exception | None = None
        try:
            self.stop()
        except Exception as error:
            failure = error
        self._mover.reload_all()
        self._modes.close()
        self._modes = None
        self._mover.wait()  # copies may still read the memory that is released next
        self._transfers.wait_and_stop()
        self._pool.close(force=True)
        if failure is not None:
            raise failure

    def __enter__(self) -> TensorSwap:
        return self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------ offload

    def swap_out(self, *tensors: torch.Tensor) -> None:
        """Begin to offload ``tensors``, ahead of queued copies. ``wait_swapped_out`` waits until their memory is free.

        Without a C++ compiler each copy begins at once, behind the copies under way.

        Raises:
            UsageError: a tensor cannot be swapped; no offload was begun.
            HostMemoryError: there is too little host memory for all tensors; some offloads may have begun.
            SwapError: not open, or stopped, or a C++ operator uses a tensor.
        """
        storages = self._storages(tensors)
        if self._make_queue:  # each goes to the head of the queue, so the first tensor is pushed last
            storages.reverse()
        for storage in storages:
            self._offload(storage, ahead=True)

    def queue_swap_out(self, *tensors: torch.Tensor) -> None:
        """Offload ``tensors`` behind queued copies. Raises: as ``swap_out``."""
        for storage in self._storages(tensors):
            self._offload(storage, ahead=False)

    def wait_swapped_out(self) -> None:
        """Wait until all tensors that are being offloaded have released their device memory.

        Raises the error of a failed copy, when all are over. Its tensor stays on the device.
        """
        self._check_open()
        self._mover.wait_offloaded()

    # ------------------------------------------------------------------ reload

    def queue_prefetch(self, *tensors: torch.Tensor) -> None:
        """Record that ``tensors`` are needed next, in this order. Skip those on the device. Raises as ``swap_out``."""
        for storage in self._storages(tensors):
            if self._mover.state(storage) is not None:
                self._wanted.append(weakref.ref(storage))

    def start_prefetches(self) -> None:
        """Give all recorded tensors device memory, and begin to reload them in order.

        Raises a ``torch.OutOfMemoryError`` without room for a tensor. This tensor and all behind it remain recorded.
        """
        self._check_open()
        while self._wanted:
            storage = self._wanted[0]()
            if storage is not None:
                self._mover.begin_reload(storage)
            del self._wanted[0]

    def cancel(self, *tensors: torch.Tensor) -> None:
        """Withdraw offloads and prefetches of ``tensors`` that have not begun. Copies under way go on.

        Raises a ``UsageError`` if a tensor cannot be swapped; nothing was withdrawn.
        """
        for storage in self._storages(tensors):
            self._wanted = [wanted for wanted in self._wanted if wanted() is not storage]
            self._mover.cancel(storage)

    def wait(self) -> None:
        """Start recorded prefetches, and wait until no copy is queued or under way. Raises as ``wait_swapped_out``."""
        self._check_open()
        self.start_prefetches()
        self._mover.wait()

    def stop(self) -> None:
        """Accept no more tensors, and finish queued copies as ``wait``. Others are reloaded on use, or by ``close``."""
        self._accepts = False
        self._wanted.clear()
        self.wait()

    def resident(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reload ``tensor`` for a use that the dispatcher cannot see, and return it. It stays until offloaded again.

        Raises a ``torch.OutOfMemoryError`` if there is no room for it.
        """
        self._check_open()
        self._before_use([tensor])
        return tensor

    def is_out(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is offloaded, and its device memory released. Raises ``SwapError`` if not open."""
        self._check_open()
        return isinstance(tensor, torch.Tensor) and self._mover.state(storage_of(tensor)) is TransferState.OFFLOADED

    @property
    def stats(self) -> TensorStats:
        """The figures since ``open``. Raises ``SwapError`` if not open."""
        self._check_open()
        mover, pool = self._mover, self._pool.stats
        return TensorStats(
            mover.out_bytes, mover.in_bytes, mover.num_passive, mover.num_recalled, pool.leased_bytes,
            pool.leased_peak_bytes,
        )  # fmt: skip

    def _before_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Reload ``tensors`` for an operation on the current stream."""
        if self._mover.is_idle:
            return
        self._check_process()
        for tensor in tensors:
            if tensor.device == self.device and tensor.layout is torch.strided:
                self._mover.require(storage_of(tensor))
        self._mover.poll()

    def _offload(self, storage: torch.UntypedStorage, *, ahead: bool) -> None:
        # An earlier `queue_prefetch` of the storage no longer applies.
        self._wanted = [wanted for wanted in self._wanted if wanted() is not storage]
        try:
            self._mover.offload(storage, ahead=ahead)
        except HostMemoryError as error:
            raise HostMemoryError(
                f"no host memory for {format_bytes(storage.nbytes())} more: TensorSwap(host_gib={self._host_gib:g}), "
                f"of which {format_bytes(self._pool.stats.leased_bytes)} are in use. Raise host_gib, or offload "
                f"fewer tensors. ({error})"
            ) from error

    # ------------------------------------------------------------------ checks

    def _storages(self, tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Return the storages of ``tensors``, each once, without empty ones. Raises as ``swap_out``."""
        self._check_open()
        if not self._accepts:
            raise SwapError("TensorSwap was stopped: it takes no more tensors. Open another one.")
        storages = map(self._storage_of, tensors)
        return list({storage._cdata: storage for storage in storages if storage is not None}.values())

    def _storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"a torch.Tensor is expected, {type(tensor).__name__} was given")
        what = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} cannot be swapped"
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UsageError(f"{what}: it is a {type(tensor).__name__}. Give the plain tensors that it is made of.")
        if tensor.layout is not torch.strided:
            raise UsageError(f"{what}: its layout is {tensor.layout}. Only dense ones can.")
        if tensor.device != self.device:
            raise UsageError(f"{what}: it is on {tensor.device}, this TensorSwap moves those of {self.device}.")
        storage = storage_of(tensor)
        if self._mover.state(storage) is not None:
            return storage
        if self._access.is_refused(storage):
            raise UsageError(f"{what}: another TensorSwap moves it.")
        if storage.nbytes() == 0:
            if tensor.numel():
                raise UsageError(f"{what}: its storage is empty (resize_).")
            return None
        if not storage.resizable() or (self.device.type == "cpu" and storage.is_shared()):
            raise UsageError(f"{what}: its memory is not PyTorch's own (numpy's, shared, a file's). Clone it first.")
        return storage

    def _check_open(self) -> None:
        if self._modes is None:
            raise SwapError("TensorSwap is not open: use it as a context (with TensorSwap(…) as swap), or call open()")
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise SwapError(
                "a forked process uses the tensors of a TensorSwap that was open at the fork: copies, threads and host "
                "memory belong to the parent process. Fork before it is opened, or close it first."
            )


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device

"""A device for tests: every copy runs as late as the engine's waits allow, and every race is reported.

There are no threads for copies. A stream's work waits until somebody waits for one of its events, so a wait that is
missing in the engine *always* leaves a copy undone. Each copy that runs is checked: both sides must still be alive, and
no copy enqueued earlier may still have to use the memory that it overwrites.
"""

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from megatron.swap.devices.base import ClockMark, Device, Elapsed
from megatron.swap.devices.emulated import POISON


class LazyStream:
    """Work in order, run on demand. ``eager``: work runs at once, as on the calling thread."""

    # A disk's threads wait for events too. Work of one stream may wait for another, so all share a lock.
    _running = threading.RLock()

    def __init__(self, name: str, eager: bool = False) -> None:
        self.name = name
        self.eager = eager
        self.work: deque[Callable[[], None]] = deque()
        self.failure: BaseException | None = None

    def enqueue(self, work: Callable[[], None]) -> None:
        if self.eager:
            work()
        else:
            self.work.append(work)

    def run_until(self, done: Callable[[], bool]) -> None:
        with self._running:
            while not done():
                work = self.work.popleft()  # an IndexError: a wait for an event that its stream never reaches
                try:
                    work()
                except BaseException as failure:
                    self.failure = failure


class LazyEvent:
    def __init__(self, stream: LazyStream) -> None:
        self._stream = stream
        self._failure: BaseException | None = None
        self.passed = False
        stream.enqueue(self._pass)

    def _pass(self) -> None:
        self.passed = True
        self._failure = self._stream.failure

    def synchronize(self) -> None:
        self._stream.run_until(lambda: self.passed)
        if self._failure is not None:
            raise RuntimeError(f"a copy failed: {self._failure}") from self._failure


@dataclass
class _Move:
    """One piece of a copy. References are weak, so that the device keeps nothing alive that the engine has dropped."""

    target: weakref.ref[torch.UntypedStorage]
    source: weakref.ref[torch.UntypedStorage]
    target_address: int
    source_address: int
    num_bytes: int

    def uses(self, address: int, num_bytes: int) -> bool:
        source = self.source()
        if source is not None and source.nbytes() == 0:
            return False  # emptied by its owner: the address may belong to another tensor now, and nothing is copied
        return any(
            start < address + num_bytes and address < start + self.num_bytes
            for start in (self.target_address, self.source_address)
        )


class LazyDevice(Device):
    """RAM as a device without any parallelism. ``eager`` names streams that run their work at once.

    Attributes:
        compute: what ``current_stream`` answers; a test may exchange it for a lazy one (a side stream).
        violations: what the copies that ran were up to, in words; empty for a correct engine.
        graveyard: memory that the engine gave up, poisoned if asked for, never reused.
    """

    def __init__(self, *, poison: bool = True, eager: Collection[str] = ()) -> None:
        self.torch_device = torch.device("cpu")
        self.compute = LazyStream("compute", eager=True)
        self.violations: list[str] = []
        self.graveyard: list[torch.UntypedStorage] = []
        self.fail_next_copy: str | None = None
        self.num_copies = {"out": 0, "in": 0}
        self._poison = poison
        self._eager = eager
        self._streams: list[LazyStream] = []
        self._queued: list[_Move] = []

    def current_stream(self) -> LazyStream:
        return self.compute

    def copy_stream(self, name: str) -> LazyStream:
        stream = LazyStream(name, eager=name in self._eager)
        self._streams.append(stream)
        return stream

    def record(self, stream: LazyStream) -> LazyEvent:
        return LazyEvent(stream)

    def wait(self, stream: LazyStream, event: LazyEvent) -> None:
        stream.enqueue(event.synchronize)

    def timed_wait(self, stream: LazyStream, event: LazyEvent) -> Elapsed:
        self.wait(stream, event)
        return Elapsed(0.0)

    def has_passed(self, event: LazyEvent) -> bool:
        return event.passed

    def copy(
        self, stream: LazyStream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> int:
        moves = []
        for target, source in zip(targets, sources, strict=True):
            assert target.dtype == source.dtype == torch.uint8
            assert target.shape == source.shape
            storages = (weakref.ref(one.untyped_storage()) for one in (target, source))
            moves.append(_Move(*storages, target.data_ptr(), source.data_ptr(), target.numel()))
        self._queued.extend(moves)
        failure, self.fail_next_copy = self.fail_next_copy, None

        def run() -> None:
            if failure is not None:
                raise OSError(failure)
            self.num_copies[stream.name] = self.num_copies.get(stream.name, 0) + 1
            for move in moves:
                self._run(move, stream.name)

        stream.enqueue(run)
        return len(moves)

    def _run(self, move: _Move, name: str) -> None:
        place = next(i for i, queued in enumerate(self._queued) if queued is move)
        earlier = self._queued[:place]
        del self._queued[place]
        source, target = move.source(), move.target()
        if source is None or target is None:
            self.violations.append(f"{name}: the {'source' if source is None else 'target'} was freed before its copy")
            return
        if source.nbytes() == 0:
            return  # emptied by its owner, who will fill it again: what was copied is of no use to anybody
        if any(queued.uses(move.target_address, move.num_bytes) for queued in earlier):
            self.violations.append(f"{name}: overwrites memory that an earlier copy still uses")
        ctypes.memmove(move.target_address, move.source_address, move.num_bytes)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def discard(self, storage: torch.UntypedStorage) -> None:
        if self._poison:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)
        self.graveyard.append(storage)

    def used_on(self, storage: torch.UntypedStorage, stream: LazyStream) -> None:
        pass

    def _nothing(self) -> None:
        return None

    peak_bytes = allocated_bytes = take_peak = reserved_bytes = peak_reserved_bytes = release_cached = _nothing

    def mark(self) -> ClockMark:
        return ClockMark(self.host_ms())

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.run_until(lambda stream=stream: not stream.work)

    def close(self) -> None:
        for stream in self._streams:
            stream.run_until(lambda stream=stream: not stream.work)
        self._streams.clear()

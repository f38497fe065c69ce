"""Measures training steps: when each saved storage comes, is wanted and goes, and how much memory is in use.

It listens to the engine's ranges (``trace.Ranges``), stands in saved-tensor hooks while it is on, and changes nothing.
Times are marks on the compute stream, read when all is over; memory is read in the order of the program.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from megatron.swap.common.instrumentation import Labelled, Ranges
from megatron.swap.common.types import Site, SwapError
from megatron.swap.devices.base import Device, Mark
from megatron.swap.planner.recording import (
    EVALUATION,
    WORKS,
    Event,
    LayerRun,
    NonLayerStorage,
    Recording,
    SavedStorage,
    What,
)
from megatron.swap.profiling.non_layer import NonLayerRecorder
from megatron.swap.profiling.storage_tracker import Reference, StorageTracker, TrackedStorage


class Recomputable(Labelled, Protocol):
    """A recipe, as ``recipes.py`` has them."""

    site: Site
    number: int
    num_bytes: int
    output: Reference


class _Note(NamedTuple):
    """An event whose time is still a mark, and another behind what it took to note it."""

    what: What
    mark: Mark
    noted: Mark
    peak_bytes: int
    now_bytes: int
    details: dict[str, Any]


class Recorder:
    """Off until ``start``; then whole steps, until ``stop``. One thread at a time, as autograd's is beside ours.

    Layers whose saved tensors have no site (not hooked) are not seen: hook all of them while recording.

    Args:
        device: whose time is measured.
        ranges: tells of layers and of the engine's work.
        take_peak: most bytes in use since the last call, and bytes in use now.
        from_use: ``take_peak`` counts memory that a storage is brought back into, or made again in, from its first use
            on, as the observer does, and not from its allocation, as a device does.
    """

    def __init__(
        self, device: Device, ranges: Ranges, take_peak: Callable[[], tuple[int, int]], from_use: bool = False
    ) -> None:
        self.is_on = False
        self._from_use = from_use
        self._device = device
        self._ranges = ranges
        self._take_peak = take_peak
        self._num_chunks = 0
        self._chunk = 0
        self._non_layer = NonLayerRecorder(device)
        self._tracker: StorageTracker[SavedStorage] = StorageTracker(self._freed)
        self._forget()

    def for_times(self) -> Recorder:
        """Another one, which hears the same and is asked about no tensor: it notes when layers run, and no memory."""
        return Recorder(self._device, self._ranges, lambda: (0, 0))

    def _forget(self) -> None:
        self._notes: list[_Note] = []
        self._runs: dict[str, LayerRun] = {}
        self._records: dict[str, SavedStorage] = {}
        self._tracker.forget()
        self._of_run: dict[LayerRun, list[TrackedStorage[SavedStorage]]] = {}
        self._inputs: dict[str, int] = {}
        self._last_forward: LayerRun | None = None
        self._evaluates = False
        self._unused: dict[int, tuple[SavedStorage, Reference]] = {}

    # ---------------------------------------------------------------- on and off

    def start(self, step: int) -> None:
        """Training step ``step`` is about to begin: record it."""
        if self.is_on:
            raise SwapError("a recorder that is on was started: stop it first.")
        self._forget()
        self.is_on = True
        self._ranges.start(self, arrived=self._arrived)
        self._ranges.step(step)
        self._note(What.STEP)

    def step_ended(self, step: int) -> None:
        """A step is over, and ``step`` is the next."""
        if self.is_on:
            self._ranges.step(step)
            self._note(What.STEP)
            self._runs.clear()
            self._records.clear()
            self._of_run.clear()
            self._unused.clear()
            self._last_forward = None

    def stop(self) -> Recording:
        """What was recorded since ``start``, up to the end of the last step. Waits for the device.

        Raises:
            SwapError: the recorder is off, or no step has ended.
        """
        if sum(note.what is What.STEP for note in self._notes) < 2:
            raise SwapError("nothing was recorded: start, then step_ended at least once, then stop.")
        self.is_on = False
        self._ranges.stop(self)
        self._device.synchronize()
        notes = self._notes
        while notes[-1].what is not What.STEP:
            notes.pop()
        first = notes[0].mark
        events = tuple(
            Event(
                note.what, note.mark.elapsed_ms_since(first), note.peak_bytes, note.now_bytes,
                noting_ms=note.noted.elapsed_ms_since(note.mark), **note.details,
            )
            for note in notes
        )  # fmt: skip
        non_layer = self._non_layer.take(first)
        self._forget()
        return Recording(events, self._device.reserved_bytes(), non_layer)

    def abandon(self) -> None:
        """Training has failed, or is over: hear no more, and wait for nothing."""
        if self.is_on:
            self.is_on = False
            self._ranges.stop(self)
            self._non_layer.forget()
        self._forget()

    def _note(self, what: What, **details: Any) -> None:
        mark = self._device.mark()
        peak_bytes, now_bytes = self._take_peak()
        # Where the host is what takes time (experts wait for counts of tokens) the device stands still meanwhile.
        self._notes.append(_Note(what, mark, self._device.mark(), peak_bytes, now_bytes, details))

    # ------------------------------------------------- what runs: layers, chunks, the engine

    def watch(self, chunk: nn.Module) -> Callable[[], None]:
        """Note the forwards of a model chunk; call for each, in order. What takes that off again is returned."""
        number, self._num_chunks = self._num_chunks, self._num_chunks + 1

        def told(what: What) -> Callable[..., None]:
            def hook(*_: object) -> None:
                if not self.is_on:
                    return
                evaluates = not torch.is_grad_enabled()
                if evaluates != self._evaluates:
                    self._evaluates = evaluates
                    if not evaluates:
                        self._take_peak()  # that was the evaluation's
                    self._note(What.WORK_BEGIN if evaluates else What.WORK_END, work=EVALUATION)
                if not evaluates:
                    self._note(what, chunk=number)
                    self._last_forward = None
                    self._chunk = number
                    self._non_layer.forward_ended()

            return hook

        handles = [
            chunk.register_forward_pre_hook(told(What.CHUNK_BEGIN)),
            chunk.register_forward_hook(told(What.CHUNK_END)),
        ]

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def __call__(self, name: str) -> AbstractContextManager[object]:
        """A range of the engine, as ``trace.Ranges`` names it."""
        what, _, subject = name.partition(" ")
        if what == "forward":
            return self._forward(subject)
        if what == "backward":
            return self._backward(subject)
        if what in WORKS:
            return self._work(what, subject)
        return nullcontext()

    @contextmanager
    def _forward(self, label: str) -> Iterator[None]:
        run = self._runs[label] = _run(label)
        self._note(What.FORWARD_BEGIN, run=run)
        yield
        if self.is_on:
            self._note(What.FORWARD_END, run=run)
            if self._last_forward is not None:
                self._look_who_holds(self._last_forward)
            self._last_forward = run

    @contextmanager
    def _backward(self, label: str) -> Iterator[None]:
        run = self._runs.get(label)
        if run is None:  # its forward was before the recording
            yield
            return
        self._look_who_holds(run)
        self._note(What.BACKWARD_BEGIN, run=run)
        yield
        if self.is_on:
            self._note(What.BACKWARD_END, run=run)

    @contextmanager
    def _work(self, work: str, of: str) -> Iterator[None]:
        self._note(What.WORK_BEGIN, work=work, of=of)
        yield
        if self.is_on:
            self._note(What.WORK_END, work=work, of=of)

    def _look_who_holds(self, run: LayerRun) -> None:
        """Once: as soon as the layer's own frames are gone."""
        for memory in self._of_run.pop(run, ()):
            storage = memory.reference()
            if storage is not None and storage.nbytes() != memory.num_bytes:
                self._note(What.FREED, storage=memory.record, num_bytes=memory.num_bytes)
                memory.num_bytes = memory.record.num_bytes = storage.nbytes()
                memory.record.has_external_refs = True
            elif memory.has_external_refs():
                memory.record.has_external_refs = True

    # ------------------------------------------------------------ what autograd saves

    def called_with(self, label: str, hidden: Any) -> None:
        """The hidden states that the layer's run ``label`` begins with."""
        if self.is_on and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            self._inputs[label] = hidden.untyped_storage()._cdata

    def saved(self, site: Site, label: str, tensor: torch.Tensor) -> SavedStorage:
        """Autograd saves ``tensor`` at ``site`` in the run ``label``: its storage's record."""
        storage = tensor.untyped_storage()
        memory = self._tracker.get(storage)
        if memory is not None:
            self._records[f"{site} {_micro_batch(label)}"] = memory.record
            return memory.record
        run = self._runs[label]
        is_input = self._inputs.get(label) == storage._cdata
        record = SavedStorage(run, f"{site.path}/{site.ordinal}", storage.nbytes(), is_input)
        self._records[f"{site} {_micro_batch(label)}"] = record
        self._note(What.SAVED, storage=record, num_bytes=record.num_bytes)
        self._of_run.setdefault(run, []).append(self._tracker.track(record, storage))
        return record

    def aliased(self, tensor: torch.Tensor) -> None:
        """One more tensor on the storage of ``tensor`` stands in the graph."""
        if self.is_on and (memory := self._tracker.get(tensor.untyped_storage())) is not None:
            memory.num_aliases += 1

    def recomputed(
        self, recipe: Recomputable, producer: str, inputs: Sequence[torch.Tensor], on_the_way: Sequence[Recomputable]
    ) -> None:
        """What was saved last, or a moment ago, is not held but made again from ``inputs``."""
        if not self.is_on or (storage := recipe.output()) is None or (memory := self._tracker.get(storage)) is None:
            return
        record = memory.record
        found = [self._tracker.get(tensor.untyped_storage()) for tensor in inputs]
        record.producer = producer
        record.made_from = tuple(dict.fromkeys(one.record for one in found if one is not None))
        record.through = tuple(dict.fromkeys(f"{one.site.path}/{one.site.ordinal}+{one.number}" for one in on_the_way))
        for one, name in zip(on_the_way, record.through, strict=False):
            if one.label not in self._records:
                self._records[one.label] = SavedStorage(record.run, name, one.num_bytes, is_on_the_way=True)

    @property
    def behind_layers(self) -> bool:
        """Whether a layer of the chunk whose forward runs is through."""
        return self._last_forward is not None

    def saved_non_layer(self, site: Site, tensor: torch.Tensor) -> NonLayerStorage | None:
        """The chunk saves ``tensor`` outside its layers: its storage's record; ``None``: it has one of a layer."""
        if self._tracker.get(tensor.untyped_storage()) is not None:
            return None
        return self._non_layer.saved(self._chunk, site, tensor)

    def asked(self, record: SavedStorage | NonLayerStorage) -> None:
        """Backward wants a tensor on it."""
        if isinstance(record, NonLayerStorage):
            self._non_layer.asked(record)
        elif self.is_on:
            self._note(What.ASKED, storage=record)

    def used(self, storage: torch.UntypedStorage) -> None:
        """Backward gets a tensor on ``storage``, or a recipe does."""
        record, reference = self._unused.pop(storage._cdata, (None, None))
        if self.is_on and record is not None and reference is not None and reference() is storage:
            self._hold_again(record, storage)

    def _arrived(self, subject: Labelled, storage: torch.UntypedStorage) -> None:
        record = self._records.get(subject.label)
        if record is None:  # of before the recording
            return
        if self._from_use:
            self._unused[storage._cdata] = record, weakref.ref(storage)
        else:
            self._hold_again(record, storage)

    def _hold_again(self, record: SavedStorage, storage: torch.UntypedStorage) -> None:
        self._note(What.ARRIVED, storage=record, num_bytes=storage.nbytes())
        self._tracker.track(record, storage)

    def _freed(self, tracked: TrackedStorage[SavedStorage]) -> None:
        if self.is_on:
            self._note(What.FREED, storage=tracked.record, num_bytes=tracked.num_bytes)


def _run(label: str) -> LayerRun:
    layer, micro_batch = label.split()
    return LayerRun(int(layer.removeprefix("layers.")), int(micro_batch.removeprefix("mb")))


def _micro_batch(label: str) -> str:
    return label.split()[1]

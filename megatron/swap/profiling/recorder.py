"""Records training steps: when each saved storage is saved, needed and freed, and how much memory is in use.

The recorder listens to the engine's ranges and is called from the saved-tensor hooks; it changes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from megatron.swap.common.instrumentation import Labelled, Ranges
from megatron.swap.common.types import Site, SwapError
from megatron.swap.devices.base import Device, Mark
from megatron.swap.devices.plain_tensors import is_plain
from megatron.swap.profiling.made_gradients import MadeGradients
from megatron.swap.profiling.recording import (
    EVALUATION,
    WORKS,
    Event,
    NonLayerStorage,
    PassKey,
    Recording,
    SavedStorage,
    What,
)

Reference = weakref.ref[torch.UntypedStorage]
Record = TypeVar("Record")


@dataclass(eq=False, slots=True)
class TrackedStorage(Generic[Record]):
    record: Record
    reference: Reference
    num_bytes: int  # when last looked at: its owner may resize the storage
    num_aliases: int = 0  # tensors on the storage that the autograd graph holds

    def has_external_refs(self) -> bool:
        """Whether anyone but the autograd graph refers to the storage."""
        storage = self.reference()
        ours = 1 + self.num_aliases  # the storage's Python object, and one reference for each saved tensor
        return storage is not None and torch._C._storage_Use_Count(storage._cdata) > ours


class StorageTracker(Generic[Record]):
    """The tracked storages of one recording. ``freed`` is called with each storage that is about to be freed."""

    def __init__(self, freed: Callable[[TrackedStorage[Record]], None]) -> None:
        self._freed = freed
        self._tracked: dict[int, TrackedStorage[Record]] = {}

    def get(self, storage: torch.UntypedStorage) -> TrackedStorage[Record] | None:
        entry = self._tracked.get(storage._cdata)
        return entry if entry is not None and entry.reference() is storage else None

    def track(self, record: Record, storage: torch.UntypedStorage) -> TrackedStorage[Record]:
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
        self._tracked = {}


class NonLayerRecorder:
    """The part of a ``Recorder`` for storages outside layers."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tracker: StorageTracker[NonLayerStorage] = StorageTracker(
            lambda tracked: self._mark(tracked.record, What.FREED)
        )
        # Times in place of events: the planner counts these storages as bytes of the chunk.
        self._marks: dict[NonLayerStorage, dict[What, Mark]] = {}
        self._saved_in_forward: list[TrackedStorage[NonLayerStorage]] = []

    @property
    def num_bytes(self) -> int:
        return self._tracker.num_bytes

    def saved(self, chunk: int, site: Site, tensor: torch.Tensor) -> NonLayerStorage:
        """Note that autograd saves ``tensor`` at ``site`` of ``chunk``, and return its storage's record."""
        storage = tensor.untyped_storage()
        tracked = self._tracker.get(storage)
        if tracked is None:
            for earlier in self._saved_in_forward:
                # Behind the saving module's return its frame is gone: references that are left are others'.
                if not earlier.record.site.startswith(f"{site.path}/"):
                    earlier.record.has_external_refs = earlier.has_external_refs()
            record = NonLayerStorage(chunk, f"{site.path}/{site.ordinal}", storage.nbytes())
            self._marks[record] = {}
            self._mark(record, What.SAVED)
            tracked = self._tracker.track(record, storage)
            self._saved_in_forward.append(tracked)
        tracked.num_aliases += 1
        return tracked.record

    def forward_ended(self) -> None:
        """Note external references. Call it when the chunk's frames are gone."""
        while self._saved_in_forward:
            tracked = self._saved_in_forward.pop()
            tracked.record.has_external_refs |= tracked.has_external_refs()

    def asked(self, record: NonLayerStorage) -> None:
        self._mark(record, What.ASKED)

    def take(self, first: Mark) -> tuple[NonLayerStorage, ...]:
        """Return all records in the order of saving, with times in ms since ``first``, and forget them."""
        taken = tuple(self._marks)
        for record, marks in self._marks.items():
            record.at_ms = {what: mark.elapsed_ms_since(first) for what, mark in marks.items()}
        self.forget()
        return taken

    def forget(self) -> None:
        self._tracker.forget()
        self._marks = {}
        self._saved_in_forward.clear()

    def _mark(self, record: NonLayerStorage, what: What) -> None:
        marks = self._marks.get(record)
        if marks is not None and what not in marks:  # a record of an earlier recording has no marks
            marks[what] = self._device.mark()


class Recomputable(Labelled, Protocol):
    """The part of the engine's ``RecomputeSpec`` that the recorder uses."""

    site: Site
    number: int
    num_bytes: int
    output: Reference


class _Note(NamedTuple):
    """An event, before times can be read."""

    what: What
    mark: Mark
    noted: Mark
    peak_bytes: int
    now_bytes: int
    details: dict[str, Any]
    host_ms: float


class Recorder:
    """Records whole steps from ``start`` to ``stop``. Layers without hooks are not seen.

    ``ranges`` reports layers and the engine's work. ``take_peak`` returns the most bytes in use since the last call,
    and now; they are of use if it ``has_memory``.
    """

    def __init__(
        self, device: Device, ranges: Ranges, take_peak: Callable[[], tuple[int, int]], has_memory: bool = True
    ) -> None:
        # Autograd's thread may call the recorder too, but never two threads at a time, so there is no lock.
        self.is_on = False
        self._device = device
        self.ranges = ranges
        self._take_peak = take_peak
        # Without a GPU the bytes are those of activations alone: there are no gradients among them.
        self._has_gradients = has_memory and device.allocated_bytes() is not None
        self._chunks: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._chunk = 0
        self._timers: list[Recorder] = []
        self._non_layer = NonLayerRecorder(device)
        self._gradients = MadeGradients()
        self._tracker: StorageTracker[SavedStorage] = StorageTracker(self._freed)
        self._forget()

    def for_times(self) -> Recorder:
        """Return another recorder on the same device, ranges and chunks, for the times of layers alone."""
        timer = Recorder(self._device, self.ranges, lambda: (0, 0), has_memory=False)
        timer._chunks = self._chunks
        self._timers.append(timer)
        return timer

    def _forget(self) -> None:
        self._notes: list[_Note] = []
        self._runs: dict[str, PassKey] = {}
        self._records: dict[str, SavedStorage] = {}
        self._tracker.forget()
        self._saved_in_run: dict[PassKey, list[TrackedStorage[SavedStorage]]] = {}
        self._inputs: dict[str, set[int]] = {}
        self._called_with: dict[str, list[tuple[Reference, int]]] = {}
        self._unsaved: dict[PassKey, list[tuple[Reference, int]]] = {}
        self._shared: list[Reference] = []
        self._once: set[PassKey] = set()  # runs that must not run again
        self._last_forward: PassKey | None = None
        self._is_evaluating = False
        self._gradients.forget()

    def start(self, step: int) -> None:
        if self.is_on:
            raise SwapError("the recorder is on already: stop it first.")
        self._forget()
        self.is_on = True
        self.ranges.start(self, arrived=self._arrived)
        self.ranges.step(step)
        self._note(What.STEP)

    def step_ended(self, step: int) -> None:
        """Note that a step has ended and that ``step`` is the next one."""
        if self.is_on:
            self.ranges.step(step)
            self._note(What.STEP)
            for notes in (self._runs, self._records, self._saved_in_run):
                notes.clear()
            for inputs in (self._inputs, self._called_with, self._unsaved, self._shared):
                inputs.clear()
            self._last_forward = None
            self._gradients.forget()

    def stop(self) -> Recording:
        """Stop, and return the recording up to the end of the last whole step, or raise ``SwapError``."""
        if sum(note.what is What.STEP for note in self._notes) < 2:
            raise SwapError("nothing was recorded: start, then step_ended at least once, then stop.")
        self.is_on = False
        self.ranges.stop(self)
        self._device.synchronize()  # marks can be read once the device has passed them
        notes = self._notes
        while notes[-1].what is not What.STEP:
            notes.pop()
        for note in notes:
            storage = note.details.get("storage")
            if isinstance(storage, SavedStorage) and storage.pass_key in self._once:
                storage.is_input = False
        # Inputs that the layer does not save itself: it would have to save them to run again.
        notes = [note for note in notes if note.what is not What.INPUTS or note.details["storage"].is_input]
        first = notes[0].mark
        events = tuple(
            Event(
                note.what, note.mark.elapsed_ms_since(first), note.peak_bytes, note.now_bytes,
                noting_ms=note.noted.elapsed_ms_since(note.mark), host_at_ms=note.host_ms, **note.details,
            )
            for note in notes
        )  # fmt: skip
        non_layer = self._non_layer.take(first)
        self._forget()
        return Recording(events, self._device.reserved_bytes(), non_layer)

    def abandon(self) -> None:
        """Stop and drop the recording. Does not wait for the device, which may have failed."""
        if self.is_on:
            self.is_on = False
            self.ranges.stop(self)
            self._non_layer.forget()
        self._forget()

    def _note(self, what: What, **details: Any) -> None:
        host_ms, mark = self._device.host_ms(), self._device.mark()
        peak_bytes, now_bytes = self._take_peak()
        if what in (What.BACKWARD_BEGIN, What.BACKWARD_END):
            details["num_bytes"] = self._gradients.num_bytes()
        # Where the host is the bottleneck (experts wait for token counts), the device idles while the event is noted.
        self._notes.append(_Note(what, mark, self._device.mark(), peak_bytes, now_bytes, details, host_ms))

    def add_chunk(self, chunk: nn.Module) -> None:
        """Add a model chunk; call it for each chunk of this rank, in order."""
        self._chunks[chunk] = len(self._chunks)

    def chunk_begins(self, chunk: nn.Module) -> None:
        for each in (self, *self._timers):
            each._note_chunk(What.CHUNK_BEGIN, chunk)

    def chunk_ends(self, chunk: nn.Module) -> None:
        for each in (self, *self._timers):
            each._note_chunk(What.CHUNK_END, chunk)

    def _note_chunk(self, what: What, chunk: nn.Module) -> None:
        if not self.is_on:
            return
        is_evaluating = not torch.is_grad_enabled()
        if is_evaluating != self._is_evaluating:
            self._is_evaluating = is_evaluating
            if not is_evaluating:
                self._take_peak()  # drop the peak of the evaluation
            self._note(What.WORK_BEGIN if is_evaluating else What.WORK_END, work=EVALUATION)
        if not is_evaluating:
            if self._has_gradients:
                self._gradients.forward_of(chunk)
            self._chunk = self._chunks[chunk]
            self._note(what, chunk=self._chunk)
            self._last_forward = None
            self._non_layer.forward_ended()

    def __call__(self, name: str) -> AbstractContextManager[object]:
        """Open a range of the engine, with a name that ``Ranges`` gives."""
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
        layer, micro_batch = label.split()
        run = PassKey(int(layer.removeprefix("layers.")), int(micro_batch.removeprefix("mb")))
        self._runs[label] = run
        self._note(What.FORWARD_BEGIN, pass_key=run, num_bytes=self._non_layer.num_bytes)
        yield
        if self.is_on:
            self._note(What.FORWARD_END, pass_key=run)
            if self._last_forward is not None:
                self._find_external_refs(self._last_forward)
            self._find_unsaved(run)
            self._last_forward = run

    @contextmanager
    def _backward(self, label: str) -> Iterator[None]:
        run = self._runs.get(label)
        if run is None:  # its forward was before the recording
            yield
            return
        self._find_external_refs(run)
        self._note(What.BACKWARD_BEGIN, pass_key=run)
        yield
        if self.is_on:
            self._note(What.BACKWARD_END, pass_key=run)

    @contextmanager
    def _work(self, work: str, of: str) -> Iterator[None]:
        self._note(What.WORK_BEGIN, work=work, of=of)
        try:  # a recomputation may end early, by an exception
            yield
        finally:
            if self.is_on:
                self._note(What.WORK_END, work=work, of=of)

    def _find_external_refs(self, run: PassKey) -> None:
        """Find storages of ``run`` that others hold or have emptied."""
        # Called once for each run, when the layer's own frames are gone.
        for tracked in self._saved_in_run.pop(run, ()):
            storage = tracked.reference()
            if storage is not None and storage.nbytes() != tracked.num_bytes:
                self._note(What.FREED, storage=tracked.record, num_bytes=tracked.num_bytes)
                tracked.num_bytes = tracked.record.num_bytes = storage.nbytes()
                tracked.record.has_external_refs = True
            elif tracked.has_external_refs():
                tracked.record.has_external_refs = True
        if unsaved := self._unsaved.pop(run, None):
            alive = [reference for reference, _ in unsaved if reference() is not None]
            self._shared += alive
            total = sum(num_bytes for _, num_bytes in unsaved)
            inputs = SavedStorage(run, "", total, is_input=True, has_external_refs=bool(alive))
            self._note(What.INPUTS, storage=inputs, num_bytes=total)

    def _find_unsaved(self, run: PassKey) -> None:
        """Find inputs of ``run``, whose forward ends, that nobody saves."""
        held = [reference() for reference in self._shared]  # a held input counts for the first layer that reads it
        self._unsaved[run] = [
            (reference, num_bytes) for reference, num_bytes in self._called_with.pop(run.label, ())
            if (storage := reference()) is not None and self._tracker.get(storage) is None
            and all(storage is not other for other in held)
        ]  # fmt: skip

    def called_with(self, label: str, hidden: Any) -> None:
        """Note the hidden states that the layer's run ``label`` begins with."""
        if self.is_on and isinstance(hidden, torch.Tensor) and hidden.requires_grad and is_plain(hidden):
            self._inputs[label] = {hidden.untyped_storage()._cdata}

    def inputs(self, label: str, tensors: Sequence[torch.Tensor]) -> None:
        """Note the tensors that a layer saves if it is recomputed whole, instead of ``called_with``."""
        if self.is_on:
            storages = [tensor.untyped_storage() for tensor in tensors if is_plain(tensor)]
            self._inputs[label] = {storage._cdata for storage in storages}
            unique = {storage._cdata: storage for storage in storages}.values()
            # Those that the run does not save by itself are recorded when it ends.
            self._called_with[label] = [(weakref.ref(storage), storage.nbytes()) for storage in unique]

    def not_repeatable(self, label: str) -> None:
        """Note that the run ``label`` must not run again: tensors that it reads have changed."""
        if (run := self._runs.get(label)) is not None:  # None if its forward was before the recording
            self._once.add(run)

    def is_like(self, label: str, others: tuple[int, ...]) -> None:
        """Note that the run ``label`` is in a checkpoint, and saves the tensors that layers ``others`` saved."""
        self._note(What.LIKE, pass_key=self._runs[label], like=others)

    def saved(self, site: Site, label: str, tensor: torch.Tensor) -> SavedStorage:
        """Note that autograd saves ``tensor`` at ``site`` in the run ``label``, and return its storage's record."""
        storage, key = tensor.untyped_storage(), f"{site} {label.split()[1]}"  # site and micro-batch
        tracked = self._tracker.get(storage)
        if tracked is not None:
            self._records[key] = tracked.record
            return tracked.record
        run = self._runs[label]
        is_input = storage._cdata in self._inputs.get(label, ())
        record = SavedStorage(run, f"{site.path}/{site.ordinal}", storage.nbytes(), is_input)
        self._records[key] = record
        self._note(What.SAVED, storage=record, num_bytes=record.num_bytes)
        self._saved_in_run.setdefault(run, []).append(self._tracker.track(record, storage))
        return record

    def aliased(self, tensor: torch.Tensor) -> None:
        if self.is_on and (tracked := self._tracker.get(tensor.untyped_storage())) is not None:
            tracked.num_aliases += 1

    def recomputed(
        self, spec: Recomputable, producer: str, inputs: Sequence[torch.Tensor], unsaved: Sequence[Recomputable]
    ) -> None:
        """Note that the output of ``spec``, which was saved just now, will be recomputed from ``inputs``."""
        if not self.is_on or (storage := spec.output()) is None or (tracked := self._tracker.get(storage)) is None:
            return
        record = tracked.record
        found = [self._tracker.get(tensor.untyped_storage()) for tensor in inputs]
        record.producer = producer
        record.recompute_inputs = tuple(dict.fromkeys(one.record for one in found if one is not None))
        # Storages that nobody saves, on the way from ``inputs`` to the output.
        names = [f"{one.site.path}/{one.site.ordinal}+{one.number}" for one in unsaved]
        record.intermediates = tuple(dict.fromkeys(names))
        for one, name in zip(unsaved, names, strict=True):
            if one.label not in self._records:
                self._records[one.label] = SavedStorage(record.pass_key, name, one.num_bytes, is_intermediate=True)

    @property
    def is_past_layers(self) -> bool:
        return self._last_forward is not None

    def saved_non_layer(self, site: Site, tensor: torch.Tensor) -> NonLayerStorage | None:
        """Note a tensor that the current chunk saves outside its layers; None if a layer has saved its storage."""
        if self._tracker.get(tensor.untyped_storage()) is not None:
            return None
        return self._non_layer.saved(self._chunk, site, tensor)

    def asked(self, record: SavedStorage | NonLayerStorage) -> None:
        if isinstance(record, NonLayerStorage):
            self._non_layer.asked(record)
        elif self.is_on:
            self._note(What.ASKED, storage=record)

    def _arrived(self, subject: Labelled, storage: torch.UntypedStorage) -> None:
        record = self._records.get(subject.label)
        if record is None:  # saved before the recording
            return
        self._note(What.ARRIVED, storage=record, num_bytes=storage.nbytes())
        self._tracker.track(record, storage)

    def _freed(self, tracked: TrackedStorage[SavedStorage]) -> None:
        if self.is_on:
            self._note(What.FREED, storage=tracked.record, num_bytes=tracked.num_bytes)

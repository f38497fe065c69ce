"""Records tensors that a model chunk saves outside its layers: embedding, final norm, logits, cross entropy."""

from __future__ import annotations

import torch

from megatron.swap.common.types import Site
from megatron.swap.devices.base import Device, Mark
from megatron.swap.profiling.recording import NonLayerStorage, What
from megatron.swap.profiling.storage_tracker import StorageTracker, TrackedStorage


class NonLayerRecorder:
    """The part of a ``Recorder`` for storages outside layers. It is on while the recorder is.

    These storages get no events: each record holds its own times. The planner counts them as bytes of the chunk.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tracker: StorageTracker[NonLayerStorage] = StorageTracker(
            lambda tracked: self._mark(tracked.record, What.FREED)
        )
        self._marks: dict[NonLayerStorage, dict[What, Mark]] = {}
        self._saved_in_forward: list[TrackedStorage[NonLayerStorage]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages that are not freed yet."""
        return self._tracker.num_bytes

    def saved(self, chunk: int, site: Site, tensor: torch.Tensor) -> NonLayerStorage:
        """Note that autograd saves ``tensor`` at ``site`` of ``chunk``. Return its storage's record."""
        storage = tensor.untyped_storage()
        tracked = self._tracker.get(storage)
        if tracked is None:
            for earlier in self._saved_in_forward:
                if not earlier.record.site.startswith(f"{site.path}/"):  # the module that saved it has returned
                    earlier.record.has_external_refs = earlier.has_external_refs()
            record = NonLayerStorage(chunk, f"{site.path}/{site.ordinal}", storage.nbytes())
            self._marks[record] = {}
            self._mark(record, What.SAVED)
            tracked = self._tracker.track(record, storage)
            self._saved_in_forward.append(tracked)
        tracked.num_aliases += 1
        return tracked.record

    def forward_ended(self) -> None:
        """Note external references at the end of a chunk's forward, when its frames are gone."""
        while self._saved_in_forward:
            tracked = self._saved_in_forward.pop()
            tracked.record.has_external_refs |= tracked.has_external_refs()

    def asked(self, record: NonLayerStorage) -> None:
        """Note that backward unpacks a tensor on the storage of ``record``."""
        self._mark(record, What.ASKED)

    def take(self, first: Mark) -> tuple[NonLayerStorage, ...]:
        """Return all records in the order of saving, with times in ms since ``first``, and stop tracking them."""
        taken = tuple(self._marks)
        for record, marks in self._marks.items():
            record.at_ms = {what: mark.elapsed_ms_since(first) for what, mark in marks.items()}
        self.forget()
        return taken

    def forget(self) -> None:
        """Drop all records and stop tracking."""
        self._tracker.forget()
        self._marks = {}
        self._saved_in_forward.clear()

    def _mark(self, record: NonLayerStorage, what: What) -> None:
        marks = self._marks.get(record)
        if marks is not None and what not in marks:  # a record of an earlier recording has no marks
            marks[what] = self._device.mark()

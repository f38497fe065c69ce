"""Records tensors that a model chunk saves outside its layers: embedding, final norm, logits, cross entropy."""

from __future__ import annotations

import torch

from megatron.swap.common.types import Site
from megatron.swap.devices.base import Device, Mark
from megatron.swap.profiling.recording import NonLayerStorage, What
from megatron.swap.profiling.storage_tracker import StorageTracker, TrackedStorage


class NonLayerRecorder:
    """The part of a ``Recorder`` for storages outside layers.

    Each record holds its own times instead of events. The planner counts these storages as bytes of the chunk.
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
        """Note that backward unpacks a tensor on the storage of ``record``."""
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

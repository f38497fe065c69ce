"""Measures what a model chunk saves outside its layers: embedding, final norm, logits, cross entropy."""

from __future__ import annotations

import torch

from megatron.swap.common.types import Site
from megatron.swap.devices.base import Device, Mark
from megatron.swap.planner.recording import NonLayerStorage, What
from megatron.swap.profiling.storage_tracker import StorageTracker, TrackedStorage


class NonLayerRecorder:
    """Part of a recorder, on while that is. No events tell of it: to planning these bytes are what chunks hold."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tracker: StorageTracker[NonLayerStorage] = StorageTracker(
            lambda tracked: self._mark(tracked.record, What.FREED)
        )
        self._marks: dict[NonLayerStorage, dict[What, Mark]] = {}
        self._of_forward: list[TrackedStorage[NonLayerStorage]] = []

    def saved(self, chunk: int, site: Site, tensor: torch.Tensor) -> NonLayerStorage:
        """Autograd saves ``tensor`` at ``site`` of a chunk: its storage's record."""
        storage = tensor.untyped_storage()
        tracked = self._tracker.get(storage)
        if tracked is None:
            for earlier in self._of_forward:
                if not earlier.record.site.startswith(f"{site.path}/"):  # its own frames are gone
                    earlier.record.has_external_refs = earlier.has_external_refs()
            record = NonLayerStorage(chunk, f"{site.path}/{site.ordinal}", storage.nbytes())
            self._marks[record] = {}
            self._mark(record, What.SAVED)
            tracked = self._tracker.track(record, storage)
            self._of_forward.append(tracked)
        tracked.num_aliases += 1
        return tracked.record

    def forward_ended(self) -> None:
        """The forward of a chunk is over, and its frames are gone."""
        while self._of_forward:
            tracked = self._of_forward.pop()
            tracked.record.has_external_refs |= tracked.has_external_refs()

    def asked(self, record: NonLayerStorage) -> None:
        """Backward wants a tensor on it."""
        self._mark(record, What.ASKED)

    def take(self, first: Mark) -> tuple[NonLayerStorage, ...]:
        """All that were saved, in order, with times since ``first``; they are followed no longer."""
        taken = tuple(self._marks)
        for record, marks in self._marks.items():
            record.at_ms = {what: mark.elapsed_ms_since(first) for what, mark in marks.items()}
        self.forget()
        return taken

    def forget(self) -> None:
        """Follow none of them any longer."""
        self._tracker.forget()
        self._marks = {}
        self._of_forward.clear()

    def _mark(self, record: NonLayerStorage, what: What) -> None:
        marks = self._marks.get(record)
        if marks is not None and what not in marks:  # else of an earlier recording
            marks[what] = self._device.mark()

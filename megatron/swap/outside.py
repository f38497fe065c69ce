"""Measures what a model chunk saves outside its layers: embedding, final norm, logits, cross entropy."""

from __future__ import annotations

import torch

from megatron.swap.devices.base import Device, Mark
from megatron.swap.lives import Life, Lives
from megatron.swap.recording import OutsideStorage, What
from megatron.swap.types import Site


class OutsideRecorder:
    """Part of a recorder, on while that is. No events tell of it: to planning these bytes are what chunks hold."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lives: Lives[OutsideStorage] = Lives(lambda life: self._mark(life.record, What.FREED))
        self._marks: dict[OutsideStorage, dict[What, Mark]] = {}
        self._of_forward: list[Life[OutsideStorage]] = []

    def saved(self, chunk: int, site: Site, tensor: torch.Tensor) -> OutsideStorage:
        """Autograd saves ``tensor`` at ``site`` of a chunk: its storage's record."""
        storage = tensor.untyped_storage()
        life = self._lives.get(storage)
        if life is None:
            for earlier in self._of_forward:
                if not earlier.record.site.startswith(f"{site.path}/"):  # its own frames are gone
                    earlier.record.stays = earlier.held_elsewhere()
            record = OutsideStorage(chunk, f"{site.path}/{site.ordinal}", storage.nbytes())
            self._marks[record] = {}
            self._mark(record, What.SAVED)
            life = self._lives.follow(record, storage)
            self._of_forward.append(life)
        life.num_aliases += 1
        return life.record

    def forward_ended(self) -> None:
        """The forward of a chunk is over, and its frames are gone."""
        while self._of_forward:
            life = self._of_forward.pop()
            life.record.stays |= life.held_elsewhere()

    def asked(self, record: OutsideStorage) -> None:
        """Backward wants a tensor on it."""
        self._mark(record, What.ASKED)

    def take(self, first: Mark) -> tuple[OutsideStorage, ...]:
        """All that were saved, in order, with times since ``first``; they are followed no longer."""
        taken = tuple(self._marks)
        for record, marks in self._marks.items():
            record.at_ms = {what: mark.elapsed_ms_since(first) for what, mark in marks.items()}
        self.forget()
        return taken

    def forget(self) -> None:
        """Follow none of them any longer."""
        self._lives.forget()
        self._marks = {}
        self._of_forward.clear()

    def _mark(self, record: OutsideStorage, what: What) -> None:
        marks = self._marks.get(record)
        if marks is not None and what not in marks:  # else of an earlier recording
            marks[what] = self._device.mark()

"""Counts the bytes that autograd holds on the device at once: an independent check, which knows nothing of swapping.

A storage counts as held from its first pack or unpack until it is freed, so an offloaded storage stops counting. A
storage counts as saved from its first pack until the graph lets go of all tensors saved on it. So saved bytes are those
that autograd would hold without offloading.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.swap.devices.plain_tensors import addresses_of, is_plain
from megatron.swap.profiling.saved_tensor_hooks import Hooks, HooksContext, innermost_hooks

PLAIN = Hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
"""Hooks that keep every tensor, detached: a node that saves its own output would never die."""


class StepPeaks(NamedTuple):
    held_bytes: int  # held by autograd
    saved_bytes: int  # saved by autograd: held if nothing were offloaded or recomputed


class _Saved:
    """A storage that the graph refers to, which counts as saved while this object lives."""

    __slots__ = ("__weakref__", "_num_bytes", "_observer")

    def __init__(self, observer: Observer, num_bytes: int) -> None:
        self._observer = observer
        self._num_bytes = num_bytes
        observer._add_saved(num_bytes)

    def __del__(self) -> None:
        self._observer._add_saved(-self._num_bytes)


@dataclass(frozen=True, slots=True)
class _Counted:
    """The graph's entry for a saved tensor: the entry of the inner hooks, and its storage."""

    packed: Any
    saved: _Saved


@dataclass(slots=True)
class _Live:
    """A storage on the device. ``saved`` is dead or None if the graph does not refer to it."""

    storage: weakref.ref[torch.UntypedStorage]
    saved: weakref.ref[_Saved] | None = None


class Observer:
    """Counts the bytes of storages that pass through its hooks, parameters and special tensors left out."""

    def __init__(self, is_always_on: bool = True) -> None:
        self.live_bytes = 0  # bytes held now
        self.peak_bytes = 0  # most bytes held at once
        self.saved_bytes = 0  # bytes saved now
        self._is_always_on = is_always_on  # False: only steps that ``count_steps`` asks for
        self._num_steps = 0
        self._recent_peak_bytes = 0
        self._most_held_bytes = self._most_saved_bytes = 0  # of this step
        self._constant: dict[int, set[int]] = {}
        self._live: dict[int, _Live] = {}

    @property
    def is_on(self) -> bool:
        return self._is_always_on or self._num_steps > 0

    def count_steps(self, number: int) -> None:
        """Count the next ``number`` steps. Call it between steps."""
        self._num_steps = number

    def end_step(self) -> StepPeaks | None:
        """End a step and return its peaks; None if it was not counted."""
        peaks = StepPeaks(self._most_held_bytes, self._most_saved_bytes) if self.is_on else None
        self._num_steps = max(0, self._num_steps - 1)
        self._most_held_bytes, self._most_saved_bytes = self.live_bytes, self.saved_bytes
        return peaks

    def around(self, hooks: Hooks) -> Hooks:
        def pack(tensor: torch.Tensor) -> Any:
            if not self.is_on:
                return hooks.pack(tensor)
            saved = self._save(tensor)
            packed = hooks.pack(tensor)
            return packed if saved is None else _Counted(packed, saved)

        def unpack(packed: Any) -> torch.Tensor:
            tensor = hooks.unpack(packed.packed if type(packed) is _Counted else packed)
            if self.is_on:
                self._note(tensor)
            return tensor

        return Hooks(pack, unpack)

    def context(self, module: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which everything that autograd saves is counted, and nothing else changes."""
        if not self.is_on:
            return nullcontext()
        # Parameters, and views of them, exist without autograd.
        self._constant[id(module)] = addresses_of(module.parameters())
        return HooksContext(self.around(PLAIN))

    def counting(self) -> AbstractContextManager[None]:
        """Return a context in which the tensors that the present hooks hold are counted."""
        return _Counting(self)

    def note(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor``, which autograd has not saved: a reload's buffer, or a recomputed tensor."""
        if self.is_on:
            self._note(tensor)

    def take_peak(self) -> tuple[int, int]:
        """Return the most bytes held at once since the last call, and the bytes held now."""
        peak_bytes, self._recent_peak_bytes = self._recent_peak_bytes, self.live_bytes
        return peak_bytes, self.live_bytes

    def _save(self, tensor: torch.Tensor) -> _Saved | None:
        """Note that the graph refers to the storage of ``tensor`` while the returned object lives."""
        live = self._note(tensor)
        if live is None:
            return None
        saved = None if live.saved is None else live.saved()
        if saved is None:
            saved = _Saved(self, tensor.untyped_storage().nbytes())
            live.saved = weakref.ref(saved)
        return saved

    def _note(self, tensor: torch.Tensor) -> _Live | None:
        """Note that the storage of ``tensor`` is on the device; return None if it does not count."""
        if type(tensor) is not torch.Tensor or not is_plain(tensor) or tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        if any(address in constant for constant in self._constant.values()):
            return None
        if address in self._live:
            return self._live[address]
        num_bytes = storage.nbytes()

        # The weak reference dies with the storage itself: torch keeps its Python object alive as long.
        def gone(reference: weakref.ref[torch.UntypedStorage]) -> None:
            entry = self._live.get(address)
            if entry is not None and entry.storage is reference:
                del self._live[address]
            self.live_bytes -= num_bytes

        live = self._live[address] = _Live(weakref.ref(storage, gone))
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._recent_peak_bytes = max(self._recent_peak_bytes, self.live_bytes)
        self._most_held_bytes = max(self._most_held_bytes, self.live_bytes)
        return live

    def _add_saved(self, num_bytes: int) -> None:
        self.saved_bytes += num_bytes
        self._most_saved_bytes = max(self._most_saved_bytes, self.saved_bytes)


class _Counting(AbstractContextManager[None]):
    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        # A stack: a layer that calls ``torch.autograd.grad`` is recomputed several times, one inside another.
        self._begun: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        hooks = innermost_hooks()
        assert hooks is not None
        context = HooksContext(self._observer.around(hooks), has_around=True)
        context.__enter__()
        self._begun.append(context)

    def __exit__(self, *error: Any) -> None:
        self._begun.pop().__exit__(*error)

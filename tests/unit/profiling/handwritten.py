"""Recordings of made-up steps, written by hand event by event."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.swap.common.types import MIB
from megatron.swap.profiling.recording import Event, PassKey, Recording, SavedStorage, What

STATIC = 1000 * MIB


class Script:
    """Writes a recording: ``after`` adds time, ``use`` adds allocated memory, ``note`` adds an event."""

    def __init__(self, noting_ms: float = 0.0) -> None:
        self.events: list[Event] = []
        self.now_ms = 0.0
        self.noting_ms = noting_ms
        self.bytes = self._peak = STATIC

    def after(self, ms: float) -> Script:
        self.now_ms += ms
        return self

    def use(self, mib: float) -> Script:
        """Allocate ``mib``, or free them if negative."""
        self.bytes += int(mib * MIB)
        self._peak = max(self._peak, self.bytes)
        return self

    def blip(self, mib: float) -> Script:
        """Allocate ``mib`` and free them at once."""
        return self.use(mib).use(-mib)

    def note(self, what: What, **details: object) -> Script:
        event = Event(what, self.now_ms, self._peak, self.bytes, noting_ms=self.noting_ms, **details)  # type: ignore[arg-type]
        self.events.append(event)
        self._peak = self.bytes
        return self.after(self.noting_ms)

    def save(self, storage: SavedStorage) -> Script:
        self.use(storage.num_bytes / MIB)
        return self.note(What.SAVED, storage=storage, num_bytes=storage.num_bytes)

    def free(self, storage: SavedStorage) -> Script:
        """Free a storage. The event comes before its memory is free."""
        self.note(What.FREED, storage=storage, num_bytes=storage.num_bytes)
        return self.use(-storage.num_bytes / MIB)

    def work(self, work: str, ms: float, of: str = "", mib: float = 0.0) -> Script:
        self.note(What.WORK_BEGIN, work=work, of=of).after(ms).blip(mib)
        return self.note(What.WORK_END, work=work, of=of)

    @property
    def recording(self) -> Recording:
        return Recording(tuple(self.events))


class Layer:
    """Two sites: ``in/0`` of 10 MiB, and ``out/0`` of 30 MiB, which can be recomputed from it.

    ``again_ms``: ``out/0`` is recomputed in this time; ``None``: it is kept.
    """

    def __init__(
        self, number: int, micro_batch: int = 0, scale: float = 1.0, is_held: bool = False,
        again_ms: float | None = None,
    ) -> None:  # fmt: skip
        self.key = PassKey(number, micro_batch)
        self.again_ms = again_ms
        self.inner = SavedStorage(self.key, "in/0", int(10 * MIB * scale), is_input=True, has_external_refs=is_held)
        self.outer = SavedStorage(
            self.key, "out/0", int(30 * MIB * scale), producer="norm", recompute_inputs=(self.inner,)
        )

    def forward(self, script: Script) -> None:
        script.note(What.FORWARD_BEGIN, pass_key=self.key)
        script.after(1).save(self.inner).after(2).blip(7).save(self.outer).after(1)
        if self.again_ms is not None:
            script.free(self.outer)
        script.note(What.FORWARD_END, pass_key=self.key)

    def backward(self, script: Script) -> None:
        script.note(What.BACKWARD_BEGIN, pass_key=self.key).after(1)
        script.note(What.ASKED, storage=self.outer)
        if self.again_ms is not None:
            recompute(script, self.outer, self.again_ms)
        script.after(2).use(5).free(self.outer).after(1)
        script.note(What.ASKED, storage=self.inner).after(2).blip(2).use(-5).free(self.inner).after(1)
        script.note(What.BACKWARD_END, pass_key=self.key)


def pass_through(script: Script, layers: list[Layer]) -> None:
    """Record forward and backward of ``layers``."""
    for layer in layers:
        layer.forward(script)
    for layer in reversed(layers):
        layer.backward(script)


def recompute(script: Script, storage: SavedStorage, ms: float) -> None:
    """Recompute ``storage`` in ``ms``."""
    label = f"layers.{storage.pass_key.layer}/{storage.site} mb{storage.pass_key.micro_batch}"
    script.note(What.WORK_BEGIN, work="recompute", of=label).after(ms).use(storage.num_bytes / MIB)
    script.note(What.ARRIVED, storage=storage, num_bytes=storage.num_bytes)
    script.note(What.WORK_END, work="recompute", of=label)


def steps(script: Script, layers: Iterable[list[Layer]]) -> Recording:
    """Record one step, with a micro-batch for each of ``layers``.

    A micro-batch begins with 3 ms and ends with 4 ms outside layers. Its loss takes 2 ms and 50 MiB. The step ends with
    9 ms.
    """
    script.note(What.STEP)
    for micro_batch in layers:
        script.note(What.CHUNK_BEGIN).after(3)
        for layer in micro_batch:
            layer.forward(script)
        script.blip(50).note(What.CHUNK_END).after(2)
        for layer in reversed(micro_batch):
            layer.backward(script)
        script.after(4)
    script.after(9).note(What.STEP)
    return script.recording

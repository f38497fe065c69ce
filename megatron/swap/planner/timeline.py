"""Reads a recording: layers over micro-batches as they would have been without the engine's own work beside them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from megatron.swap.planner.recording import (
    BRING_BACK,
    EVALUATION,
    RECOMPUTE,
    TRIAL,
    Event,
    LayerRun,
    Recording,
    SavedStorage,
    What,
)

HIDDEN = frozenset({TRIAL, BRING_BACK, EVALUATION})
"""Work whose memory is no layer's: there while recording only, or counted as what arrived, or no step's."""

Moment = tuple[What, str]
"""Of a backward: it begins or ends, or a site is asked for or freed. What follows the end, before the next layer or
step begins, is the embedding's backward or the optimizer."""


@dataclass(eq=False)
class Pass:
    """A layer over one micro-batch. Times in ms, memory in bytes.

    Attributes:
        saved_at: from the beginning of forward, by site.
        moments: from the beginning of backward, in order.
        temporaries: from each moment to the next, the most that was in use besides static memory and saved storages.
        forward_peak_bytes: the most in forward, above what all its saved storages take.
        way_bytes: the most at once of what recipes make on the way to saved storages.
        was_tried: recipes were tried in its forward: the host waited for the device, and time is not what it is else.
    """

    run: LayerRun
    sites: dict[str, SavedStorage] = field(default_factory=dict)
    saved_at: dict[str, float] = field(default_factory=dict)
    moments: dict[Moment, float] = field(default_factory=dict)
    temporaries: dict[Moment, int] = field(default_factory=dict)
    forward_ms: float | None = None
    backward_ms: float | None = None
    forward_peak_bytes: int = 0
    way_bytes: int = 0
    was_tried: bool = False

    @property
    def is_whole(self) -> bool:
        return self.forward_ms is not None and self.backward_ms is not None


@dataclass
class Around:
    """What of a step is not in a layer; a number for each micro-batch.

    Attributes:
        forward_ms: of each chunk, without its layers.
        kept_bytes: held outside layers, at the beginning and at the end of each chunk's forward.
        loss_ms, loss_peak_bytes: from a chunk's end to its own backward; most in use besides what layers have saved.
        between_ms: from a backward's end to the next forward.
        after_ms: from the last backward to the step's end.
        step_ms: the whole step.
        was_tried: as of a ``Pass``.
    """

    forward_ms: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    kept_bytes: defaultdict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    loss_ms: list[float] = field(default_factory=list)
    loss_peak_bytes: list[int] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    after_ms: float = 0.0
    step_ms: float = 0.0
    was_tried: bool = False


class Timeline:
    """A recording, read once.

    Attributes:
        static_bytes: allocated when a step begins.
        peak_bytes: most allocated.
        passes: in the order of their forwards.
        steps: what is around them.
        costs: ms that recipes took in backward, what they waited for aside, by layer and site.
    """

    def __init__(self, recording: Recording) -> None:
        events = recording.events
        self.static_bytes = max(event.now_bytes for event in events if event.what is What.STEP)
        self.peak_bytes = max(event.peak_bytes for event in events[1:])
        self.passes: list[Pass] = []
        self.steps: list[Around] = []
        self._around = Around()
        self.costs: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        self._of: dict[LayerRun, Pass] = {}
        self._works: list[tuple[Event, list[float]]] = []
        self._paused_ms = 0.0
        self._held: dict[SavedStorage, int] = {}
        self._held_bytes = self._way_bytes = 0
        self._forward: Pass | None = None
        self._last_forward: Pass | None = None
        self._backward: Pass | None = None
        self._moment: Moment = (What.BACKWARD_BEGIN, "")
        self._begin_ms = self._chunk_ms = self._layers_ms = 0.0
        self._step_ms: float | None = None
        self._backward_end_ms: float | None = None
        self._chunk_end_ms: float | None = None
        self._saved_bytes = self._top_bytes = self._between_bytes = self._kept_before_bytes = 0
        for before, event in zip((events[0], *events), events, strict=False):
            self._level(before, event)
            self._clock(event)
            self._play(event, self._now_ms(event))
            self._hold_or_drop(event)
            self._pause(event.noting_ms)

    # ------------------------------------------------------------------ time

    def _now_ms(self, event: Event) -> float:
        """On a clock that stands still while the engine works, or the recorder notes something."""
        return (self._works[0][0].at_ms if self._works else event.at_ms) - self._paused_ms

    def _clock(self, event: Event) -> None:
        if event.what is What.WORK_BEGIN:
            self._works.append((event, [0.0]))
            if event.work == TRIAL:
                self._around.was_tried = True
                if self._forward is not None:
                    self._forward.was_tried = True
        elif event.what is What.WORK_END:
            began, nested_ms = self._works.pop()
            elapsed_ms = event.at_ms - began.at_ms
            if event.work == RECOMPUTE:
                layer, _, site = event.of.split()[0].partition("/")
                self.costs[int(layer.removeprefix("layers.")), site].append(elapsed_ms - nested_ms[0])
            self._pause(elapsed_ms)

    def _pause(self, ms: float) -> None:
        """So long something ran that is no part of what stands around it."""
        if self._works:
            self._works[-1][1][0] += ms
        else:
            self._paused_ms += ms

    # ---------------------------------------------------------------- memory

    def _level(self, before: Event, event: Event) -> None:
        """Between two events: how much was in use besides static memory and saved storages, and whose that is."""
        if any(began.work in HIDDEN for began, _ in self._works):
            return
        peak_bytes = event.peak_bytes
        if before.what is What.FREED and peak_bytes == before.now_bytes:
            peak_bytes = event.now_bytes  # nothing exceeded what was there when the freed storage still was
        held_bytes = self._held_bytes + (event.num_bytes if event.what is What.ARRIVED else 0)
        other_bytes = max(0, peak_bytes - self.static_bytes - held_bytes)
        if self._forward is not None:
            self._top_bytes = max(self._top_bytes, other_bytes + self._saved_bytes)
        elif self._backward is not None:
            levels = self._backward.temporaries
            levels[self._moment] = max(levels.get(self._moment, 0), other_bytes)
        else:
            self._between_bytes = max(self._between_bytes, other_bytes)

    def _kept_bytes(self, event: Event) -> int:
        return max(0, event.now_bytes - self.static_bytes - self._held_bytes)

    def _hold_or_drop(self, event: Event) -> None:
        storage = event.storage
        if storage is not None and event.what is What.FREED:
            self._drop(storage)
        elif storage is not None and event.what in (What.SAVED, What.ARRIVED):
            self._held[storage] = event.num_bytes
            self._held_bytes += event.num_bytes
            self._way_bytes += event.num_bytes * storage.is_on_the_way
            if self._backward is not None:
                self._backward.way_bytes = max(self._backward.way_bytes, self._way_bytes)
        elif event.what is What.FORWARD_BEGIN:
            for storage in [one for one in self._held if one.has_external_refs and not self._is_wanted(one)]:
                self._drop(storage)  # it belongs to others alone

    def _is_wanted(self, storage: SavedStorage) -> bool:
        """Whether its layer's backward is still to come, or not over."""
        one = self._of.get(storage.run)
        return one is not None and one.sites.get(storage.site) is storage and not one.is_whole

    def _drop(self, storage: SavedStorage) -> None:
        num_bytes = self._held.pop(storage, 0)
        self._held_bytes -= num_bytes
        self._way_bytes -= num_bytes * storage.is_on_the_way

    # ---------------------------------------------------------------- events

    def _play(self, event: Event, now_ms: float) -> None:
        match event.what:
            case What.STEP:
                self._step(now_ms)
            case What.CHUNK_BEGIN:
                if self._backward_end_ms is not None:
                    self._around.between_ms.append(now_ms - self._backward_end_ms)
                self._backward = self._backward_end_ms = None
                self._chunk_ms, self._layers_ms = now_ms, 0.0
                self._kept_before_bytes = self._kept_bytes(event)
            case What.CHUNK_END:
                self._around.forward_ms[event.chunk].append(now_ms - self._chunk_ms - self._layers_ms)
                self._around.kept_bytes[event.chunk].append((self._kept_before_bytes, self._kept_bytes(event)))
                self._chunk_end_ms = now_ms
            case What.FORWARD_BEGIN:
                assert event.run is not None
                self._forward = self._of[event.run] = Pass(event.run)
                self._backward = self._backward_end_ms = None
                self.passes.append(self._forward)
                self._begin_ms = now_ms
                self._saved_bytes = self._top_bytes = 0
            case What.FORWARD_END:
                self._end_forward(now_ms)
            case What.BACKWARD_BEGIN:
                self._begin_backward(event, now_ms)
            case What.BACKWARD_END:
                if self._backward is not None and self._backward.run == event.run:
                    self._backward.backward_ms = now_ms - self._begin_ms
                    self._backward_end_ms = now_ms
                    self._enter((What.BACKWARD_END, ""), now_ms)
            case What.SAVED:
                assert event.storage is not None
                if self._forward is not None and event.storage.run == self._forward.run:
                    self._forward.sites[event.storage.site] = event.storage
                    self._forward.saved_at[event.storage.site] = now_ms - self._begin_ms
                    self._saved_bytes += event.num_bytes
            case What.ASKED | What.FREED:
                self._come_or_gone(event, now_ms)

    def _step(self, now_ms: float) -> None:
        if self._backward_end_ms is not None:
            self._around.after_ms = now_ms - self._backward_end_ms
        if self._step_ms is not None:
            self._around.step_ms = now_ms - self._step_ms
            self.steps.append(self._around)
        self._around, self._step_ms = Around(), now_ms
        self._backward = self._backward_end_ms = self._chunk_end_ms = self._last_forward = None
        self._of.clear()

    def _end_forward(self, now_ms: float) -> None:
        one = self._forward
        assert one is not None
        one.forward_ms = now_ms - self._begin_ms
        one.forward_peak_bytes = max(0, self._top_bytes - self._saved_bytes)
        self._layers_ms += one.forward_ms
        self._forward, self._last_forward = None, one
        self._between_bytes = 0

    def _begin_backward(self, event: Event, now_ms: float) -> None:
        assert event.run is not None
        one = self._of.get(event.run)
        if one is not None and one is self._last_forward:  # what comes between the two is the loss
            self._around.loss_peak_bytes.append(self._between_bytes)
            if self._chunk_end_ms is not None:
                self._around.loss_ms.append(now_ms - self._chunk_end_ms)
        elif self._backward is not None and self._backward.backward_ms is None:
            self._backward.backward_ms = now_ms - self._begin_ms  # nobody told its end
        self._last_forward = self._chunk_end_ms = self._backward_end_ms = None
        self._backward, self._begin_ms = one, now_ms
        if one is not None:
            self._enter((What.BACKWARD_BEGIN, ""), now_ms)

    def _come_or_gone(self, event: Event, now_ms: float) -> None:
        """A storage of the layer that backward is in: asked for the first time, or freed (the last time counts)."""
        one, storage = self._backward, event.storage
        assert storage is not None
        if one is None or storage.run != one.run or one.sites.get(storage.site) is not storage:
            return
        moment = (event.what, storage.site)
        if event.what is What.FREED or moment not in one.moments:
            self._enter(moment, now_ms)

    def _enter(self, moment: Moment, now_ms: float) -> None:
        assert self._backward is not None
        self._moment = moment
        self._backward.moments.pop(moment, None)
        self._backward.moments[moment] = now_ms - self._begin_ms

"""Reads a recording into layer passes, with the time and memory of the engine's own work removed."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.swap.common.types import MIB
from megatron.swap.profiling.recording import (
    BRING_BACK,
    EVALUATION,
    RECOMPUTE,
    TRIAL,
    Event,
    PassKey,
    Recording,
    SavedStorage,
    What,
)

EXCLUDED_WORK = frozenset({TRIAL, BRING_BACK, EVALUATION})
"""Work whose memory does not count. Trials occur only while recording, reloaded storages count when they arrive,
evaluations belong to no step."""
Moment = tuple[What, str]  # a moment of a backward: its begin or end, or the first use or the free of a site


LEFT_BYTES = 16 * MIB
"""Least memory freed between two steps that counts. Less may be the last batch, which the next replaces."""
FIRST_OF_STEP = frozenset({What.CHUNK_BEGIN, What.FORWARD_BEGIN})  # events of which one begins a step's first forward


@dataclass(eq=False)
class LayerPass:
    """The forward and backward of one layer over one micro-batch. Times in ms, memory in bytes."""

    pass_key: PassKey
    sites: dict[str, SavedStorage] = field(default_factory=dict)  # saved storages, by site
    unsaved_inputs: SavedStorage | None = None  # inputs that only a layer recomputed whole would save
    saved_at: dict[str, float] = field(default_factory=dict)  # time of each save since the begin of forward, by site
    freed_at: dict[str, float] = field(default_factory=dict)  # time when forward itself frees a saved storage
    # Peak since the save before, besides saved memory and the storage itself, by site.
    beside_bytes: dict[str, int] = field(default_factory=dict)
    end_bytes: int = 0  # peak of forward behind its last save, besides saved memory
    forward_peak_bytes: int = 0  # peak of forward above the sum of all its saved storages
    # Time of each moment since the begin of backward, in order.
    moments: dict[Moment, float] = field(default_factory=dict)
    # From each moment to the next, the peak besides static and saved memory.
    temporaries: dict[Moment, int] = field(default_factory=dict)
    forward_ms: float | None = None
    backward_ms: float | None = None
    host_ms: float = 0.0  # the host's time in forward
    non_layer_bytes: int = 0  # saved outside the layers before its forward; part of ``temporaries`` and the peak
    intermediate_bytes: int = 0  # peak of the unsaved intermediates of recomputations
    made_bytes: int = 0  # weight gradients that the layer's first backward of a step makes and leaves
    has_trials: bool = False  # recomputations were tried in forward, so that the host waited for the device
    like: tuple[int, ...] = ()  # layers that were recorded in its place; none: this layer was recorded

    @property
    def is_whole(self) -> bool:
        return self.forward_ms is not None and self.backward_ms is not None


@dataclass
class NonLayerStep:
    """The part of a step outside layers. Lists have a number for each micro-batch."""

    # By chunk: its forward without its layers, and the memory held outside layers at the begin and end of it.
    forward_ms: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    kept_bytes: defaultdict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    loss_ms: list[float] = field(default_factory=list)  # time from the end of a chunk's forward to its own backward
    loss_peak_bytes: list[int] = field(default_factory=list)  # peak meanwhile, besides static and saved memory
    between_ms: list[float] = field(default_factory=list)  # time from the end of a backward to the next forward
    after_ms: float = 0.0  # time from the last backward to the end of the step
    step_ms: float = 0.0  # time of the whole step
    has_trials: bool = False  # as ``LayerPass.has_trials``


class Timeline:
    def __init__(self, recording: Recording) -> None:
        events = recording.events
        self.static_bytes = _static_bytes(events)  # allocated when a step begins
        self.between_bytes = 0  # peak from a step's last event to the next first forward, besides static memory
        self.most_bytes = 0  # peak of the steps, besides static memory
        self.peak_bytes = max(event.peak_bytes for event in events[1:])  # peak of allocated memory
        self.passes: list[LayerPass] = []  # layer passes in the order of their forwards
        self.steps: list[NonLayerStep] = []  # the parts of the steps outside layers
        self._non_layer = NonLayerStep()
        # By layer and site: times of recomputations in ms, without waits and nested work.
        self.costs: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        self._pass_of: dict[PassKey, LayerPass] = {}
        self._open_work: list[tuple[Event, list[float]]] = []
        self._paused_ms = 0.0
        self._resident: dict[SavedStorage, int] = {}
        self._resident_bytes = self._intermediate_bytes = 0
        self._made_bytes = self._made_in_layers_bytes = 0
        self._makers: dict[int, LayerPass] = {}  # by layer: its pass whose backward was the step's first
        self._maker: LayerPass | None = None  # that of the layer whose backward began last
        self._forward: LayerPass | None = None
        self._last_forward: LayerPass | None = None
        self._backward: LayerPass | None = None
        self._moment: Moment = (What.BACKWARD_BEGIN, "")
        self._begin_ms = self._begin_host_ms = self._chunk_ms = self._layers_ms = 0.0
        self._step_ms: float | None = None
        self._is_between_steps = True
        self._backward_end_ms: float | None = None
        self._chunk_end_ms: float | None = None
        self._saved_bytes = self._forward_peak_bytes = self._loss_peak_bytes = self._kept_before_bytes = 0
        for before, event in zip((events[0], *events), events, strict=False):
            self._track_memory(before, event)
            self._track_work(event)
            self._apply(event, self._now_ms(event))
            self._track_resident(event)
            self._exclude(event.noting_ms)

    def _now_ms(self, event: Event) -> float:
        """Return the time without the engine's own work and without the recorder's."""
        return (self._open_work[0][0].at_ms if self._open_work else event.at_ms) - self._paused_ms

    def _track_work(self, event: Event) -> None:
        if event.what is What.WORK_BEGIN:
            self._open_work.append((event, [0.0]))
            if event.work == TRIAL:
                self._non_layer.has_trials = True
                if self._forward is not None:
                    self._forward.has_trials = True
        elif event.what is What.WORK_END:
            began, nested_ms = self._open_work.pop()
            elapsed_ms = event.at_ms - began.at_ms
            if event.work == RECOMPUTE:
                layer, _, site = event.of.split()[0].partition("/")
                self.costs[int(layer.removeprefix("layers.")), site].append(elapsed_ms - nested_ms[0])
            self._exclude(elapsed_ms)

    def _exclude(self, ms: float) -> None:
        """Exclude ``ms`` from the enclosing work, or from the clock if no work is open."""
        if self._open_work:
            self._open_work[-1][1][0] += ms
        else:
            self._paused_ms += ms

    def _track_memory(self, before: Event, event: Event) -> None:
        """Attribute the peak between two events, less static and saved memory, to forward, backward or loss."""
        if any(began.work in EXCLUDED_WORK for began, _ in self._open_work):
            return
        peak_bytes = event.peak_bytes
        if before.what is What.FREED and peak_bytes == before.now_bytes:
            peak_bytes = event.now_bytes  # the peak is that before the storage was freed, which is counted already
        if event is before:  # the first event has the peak from before the recording
            return
        self.most_bytes = max(self.most_bytes, peak_bytes - self.static_bytes)
        if event.what is What.STEP or self._is_between_steps:
            self.between_bytes = max(self.between_bytes, peak_bytes - self.static_bytes)
            return
        resident_bytes = self._resident_bytes + (event.num_bytes if event.what is What.ARRIVED else 0)
        other_bytes = max(0, peak_bytes - self.static_bytes - resident_bytes - self._made_in_layers_bytes)
        if self._forward is not None:
            self._forward.end_bytes = max(self._forward.end_bytes, other_bytes)
            self._forward_peak_bytes = max(self._forward_peak_bytes, other_bytes + self._saved_bytes)
        elif self._backward is not None:
            levels = self._backward.temporaries
            levels[self._moment] = max(levels.get(self._moment, 0), other_bytes)
        else:
            self._loss_peak_bytes = max(self._loss_peak_bytes, other_bytes)

    def _kept_bytes(self, event: Event) -> int:
        return max(0, event.now_bytes - self.static_bytes - self._resident_bytes - self._made_in_layers_bytes)

    def _track_resident(self, event: Event) -> None:
        storage = event.storage
        if storage is not None and event.what is What.FREED:
            self._drop(storage)
        elif storage is not None and event.what in (What.SAVED, What.ARRIVED):
            self._resident[storage] = event.num_bytes
            self._resident_bytes += event.num_bytes
            self._intermediate_bytes += event.num_bytes * storage.is_intermediate
            if self._backward is not None:
                self._backward.intermediate_bytes = max(self._backward.intermediate_bytes, self._intermediate_bytes)
        elif event.what is What.FORWARD_BEGIN:
            for storage in [one for one in self._resident if one.has_external_refs and not self._is_wanted(one)]:
                self._drop(storage)  # only other references hold it now

    def _is_wanted(self, storage: SavedStorage) -> bool:
        """Whether the backward of its layer has yet to end."""
        one = self._pass_of.get(storage.pass_key)
        return one is not None and one.sites.get(storage.site) is storage and not one.is_whole

    def _drop(self, storage: SavedStorage) -> None:
        num_bytes = self._resident.pop(storage, 0)
        self._resident_bytes -= num_bytes
        self._intermediate_bytes -= num_bytes * storage.is_intermediate

    def _apply(self, event: Event, now_ms: float) -> None:
        if event.what in FIRST_OF_STEP:
            self._is_between_steps = False
        match event.what:
            case What.STEP:
                self._begin_step(now_ms)
            case What.CHUNK_BEGIN:
                if self._backward_end_ms is not None:
                    self._non_layer.between_ms.append(now_ms - self._backward_end_ms)
                self._leave_backward()
                self._chunk_ms, self._layers_ms = now_ms, 0.0
                self._kept_before_bytes = self._kept_bytes(event)
            case What.CHUNK_END:
                self._non_layer.forward_ms[event.chunk].append(now_ms - self._chunk_ms - self._layers_ms)
                self._non_layer.kept_bytes[event.chunk].append((self._kept_before_bytes, self._kept_bytes(event)))
                self._chunk_end_ms = now_ms
            case What.FORWARD_BEGIN:
                assert event.pass_key is not None
                self._forward = self._pass_of[event.pass_key] = LayerPass(event.pass_key)
                self._forward.non_layer_bytes = event.num_bytes
                self._leave_backward()
                self.passes.append(self._forward)
                self._begin_ms = now_ms
                self._begin_host_ms = event.host_at_ms
                self._saved_bytes = self._forward_peak_bytes = 0
            case What.FORWARD_END:
                self._end_forward(now_ms, event.host_at_ms)
            case What.BACKWARD_BEGIN:
                self._begin_backward(event, now_ms)
            case What.BACKWARD_END:
                self._note_made(event)
                if self._backward is not None and self._backward.pass_key == event.pass_key:
                    self._backward.backward_ms = now_ms - self._begin_ms
                    self._backward_end_ms = now_ms
                    # The end lasts until the next layer begins; meanwhile the embedding's backward runs.
                    self._enter(self._backward, (What.BACKWARD_END, ""), now_ms)
            case What.SAVED:
                assert event.storage is not None
                if self._forward is not None and event.storage.pass_key == self._forward.pass_key:
                    self._forward.sites[event.storage.site] = event.storage
                    self._forward.saved_at[event.storage.site] = now_ms - self._begin_ms
                    self._forward.beside_bytes[event.storage.site] = max(0, self._forward.end_bytes - event.num_bytes)
                    self._forward.end_bytes = 0
                    self._saved_bytes += event.num_bytes
            case What.INPUTS:
                assert event.storage is not None
                if (one := self._pass_of.get(event.storage.pass_key)) is not None:
                    one.unsaved_inputs = event.storage
            case What.LIKE:
                assert event.pass_key is not None
                self._pass_of[event.pass_key].like = event.like
            case What.ASKED | What.FREED:
                self._note_use(event, now_ms)

    def _begin_step(self, now_ms: float) -> None:
        if self._backward_end_ms is not None:
            self._non_layer.after_ms = now_ms - self._backward_end_ms
        if self._step_ms is not None:
            self._non_layer.step_ms = now_ms - self._step_ms
            self.steps.append(self._non_layer)
        self._non_layer, self._step_ms = NonLayerStep(), now_ms
        self._leave_backward()
        self._is_between_steps = True
        self._chunk_end_ms = self._last_forward = self._maker = None
        self._made_bytes = self._made_in_layers_bytes = 0
        self._makers.clear()
        self._pass_of.clear()

    def _leave_backward(self) -> None:
        """End a backward that something else follows."""
        one, self._backward, self._backward_end_ms = self._backward, None, None
        if one is not None and one.backward_ms is None:
            # The layer's input needs no gradient, so the backward has no end of its own.
            one.backward_ms = max(one.moments.values(), default=0.0)

    def _end_forward(self, now_ms: float, host_at_ms: float) -> None:
        one = self._forward
        assert one is not None
        one.forward_ms = now_ms - self._begin_ms
        one.host_ms = host_at_ms - self._begin_host_ms
        one.forward_peak_bytes = max(0, self._forward_peak_bytes - self._saved_bytes)
        self._layers_ms += one.forward_ms
        self._forward, self._last_forward = None, one
        self._loss_peak_bytes = 0

    def _begin_backward(self, event: Event, now_ms: float) -> None:
        assert event.pass_key is not None
        one = self._pass_of.get(event.pass_key)
        if one is not None and one is self._last_forward:  # between the two runs the loss
            self._maker = None  # gradients made since are not of layers
            self._non_layer.loss_peak_bytes.append(self._loss_peak_bytes)
            if self._chunk_end_ms is not None:
                self._non_layer.loss_ms.append(now_ms - self._chunk_end_ms)
        elif self._backward is not None and self._backward.backward_ms is None:
            self._backward.backward_ms = now_ms - self._begin_ms  # its end was not recorded
        self._last_forward = self._chunk_end_ms = self._backward_end_ms = None
        self._backward, self._begin_ms = one, now_ms
        self._note_made(event)
        # An expert may get its gradient in a later micro-batch. The step holds it from then on, like the others.
        self._maker = None if one is None else self._makers.setdefault(one.pass_key.layer, one)
        if one is not None:
            self._enter(one, (What.BACKWARD_BEGIN, ""), now_ms)

    def _note_made(self, event: Event) -> None:
        """Count the gradients made since the last call for the layer whose backward ran."""
        more_bytes, self._made_bytes = event.num_bytes - self._made_bytes, event.num_bytes
        if self._maker is not None and more_bytes > 0:
            self._maker.made_bytes += more_bytes
            self._made_in_layers_bytes += more_bytes

    def _note_use(self, event: Event, now_ms: float) -> None:
        """Record the first use, or the last free, of a storage of the layer whose backward runs."""
        one, storage, forward = self._backward, event.storage, self._forward
        assert storage is not None
        if forward is not None and event.what is What.FREED and forward.sites.get(storage.site) is storage:
            forward.freed_at[storage.site] = now_ms - self._begin_ms
        if one is None or storage.pass_key != one.pass_key or one.sites.get(storage.site) is not storage:
            return
        moment = (event.what, storage.site)
        if event.what is What.FREED or moment not in one.moments:
            self._enter(one, moment, now_ms)

    def _enter(self, backward: LayerPass, moment: Moment, now_ms: float) -> None:
        self._moment = moment
        backward.moments.pop(moment, None)
        backward.moments[moment] = now_ms - self._begin_ms


def _static_bytes(events: Sequence[Event]) -> int:
    """Return the most memory allocated when a step begins."""
    most_bytes = begun_bytes = freed_bytes = 0
    is_between = False
    for event in events:
        if event.what is What.STEP:
            is_between, begun_bytes = True, event.now_bytes
        elif is_between and event.what in FIRST_OF_STEP:
            is_between = False
            # Gradients that the optimizer has copied in single precision go before the first forward.
            freed_bytes = begun_bytes - event.now_bytes
            if freed_bytes < LEFT_BYTES:
                freed_bytes = 0
            most_bytes = max(most_bytes, begun_bytes - freed_bytes)
    return max(most_bytes, begun_bytes - freed_bytes)  # behind the last step as much is freed as before it

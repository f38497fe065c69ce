"""Recordings of a few training steps, from which ``profile_builder`` makes a profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

TRIAL, BRING_BACK, RECOMPUTE = "trial", "bring_back", "recompute"
WORKS = frozenset({"wait", "release", "swap_out", "swap_in", "prefetch", TRIAL, BRING_BACK, RECOMPUTE})
"""Ranges of the engine's own work, which a layer without swapping does not do."""
EVALUATION = "evaluation"
"""Forwards without gradients between steps. They are recorded as work, so that they count for no step."""


class What(Enum):
    STEP = auto()  # a step begins, and the previous one ends
    CHUNK_BEGIN = auto()
    CHUNK_END = auto()  # forward of a model chunk, including the parts outside its layers
    FORWARD_BEGIN = auto()
    FORWARD_END = auto()
    BACKWARD_BEGIN = auto()
    BACKWARD_END = auto()  # forward or backward of a layer over one micro-batch
    WORK_BEGIN = auto()
    WORK_END = auto()  # work of the engine, which may be nested, or an evaluation
    SAVED = auto()  # autograd saves a storage for the first time
    ASKED = auto()  # backward needs a storage. The event comes before any wait or recomputation.
    ARRIVED = auto()  # a storage has device memory again: the buffer of a reload, or a recomputed storage
    INPUTS = auto()  # a layer's inputs that it does not save, and would save if it were recomputed whole
    FREED = auto()  # the device memory of a storage is about to be freed
    LIKE = auto()  # a layer runs in a checkpoint, because it is like others that were recorded in the same forward


@dataclass(frozen=True, slots=True)
class PassKey:
    """A pass: a layer over one micro-batch of a step."""

    layer: int
    micro_batch: int

    @property
    def label(self) -> str:
        return f"layers.{self.layer} mb{self.micro_batch}"


@dataclass(eq=False, slots=True)
class SavedStorage:
    pass_key: PassKey  # the pass that saved the storage first
    site: str  # ``path/ordinal``
    num_bytes: int  # its size
    is_input: bool = False  # the layer's input, with a gradient: the whole layer can be recomputed from it
    has_external_refs: bool = False  # others hold it, or it was emptied, so that offloading would free nothing
    producer: str | None = None  # kind of kernel that recomputes it bit for bit; None: not recomputed
    # Saved storages that recomputing reads, without parameters.
    recompute_inputs: tuple[SavedStorage, ...] = field(default=(), repr=False)
    intermediates: tuple[str, ...] = ()  # unsaved storages that recomputing goes through, by name
    is_intermediate: bool = False  # such an unsaved storage itself, which exists only in backward


@dataclass(eq=False, slots=True)
class NonLayerStorage:
    """A storage that autograd saved outside the layers."""

    chunk: int  # number in model order
    site: str  # ``path/ordinal``
    num_bytes: int  # its size
    has_external_refs: bool = False
    """Others (the chunk's frames, the batch) held it when a later storage was saved, or when forward ended."""
    # When it was SAVED, first ASKED and FREED, as ``Event.at_ms``.
    at_ms: dict[What, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    what: What
    at_ms: float  # time since the first event, on the compute stream
    peak_bytes: int  # peak of allocated memory since the previous event
    now_bytes: int  # allocated memory
    pass_key: PassKey | None = None  # of events of passes
    storage: SavedStorage | None = None  # of SAVED, ASKED, ARRIVED and FREED; of INPUTS all of them as a single storage
    num_bytes: int = 0  # allocated or freed; of FORWARD_BEGIN: saved outside the layers so far
    work: str = ""  # one of ``WORKS`` or ``EVALUATION``
    of: str = ""  # subject of the work, such as ``layers.3/mlp/0 mb0``
    chunk: int = 0  # number in model order, of CHUNK_BEGIN and CHUNK_END
    like: tuple[int, ...] = ()  # the recorded layers, of LIKE
    noting_ms: float = 0.0  # time behind ``at_ms`` that the recorder took
    host_at_ms: float = 0.0  # on the host's clock


@dataclass(frozen=True)
class Recording:
    """Whole steps: the first event and the last are STEP."""

    events: tuple[Event, ...]
    reserved_bytes: int | None = None  # by the allocator at the end; None: the device has no such allocator
    non_layer: tuple[NonLayerStorage, ...] = ()  # storages saved outside the layers, in order

    @property
    def num_steps(self) -> int:
        return sum(event.what is What.STEP for event in self.events) - 1

"""Raw recordings of a few training steps, from which ``profiling/profile_builder.py`` builds a profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

TRIAL, BRING_BACK, RECOMPUTE = "trial", "bring_back", "recompute"
WORKS = frozenset({"wait", "release", "swap_out", "swap_in", "prefetch", TRIAL, BRING_BACK, RECOMPUTE})
"""Names of the ranges of the engine's own work, which a layer without swapping does not do."""
EVALUATION = "evaluation"
"""Forwards without gradients between steps. They are recorded as work, so that they count for no step."""


class What(Enum):
    """Kinds of events."""

    STEP = auto()
    """A step begins, and the previous one ends."""
    CHUNK_BEGIN = auto()
    CHUNK_END = auto()
    """Forward of a model chunk, including the parts outside its layers."""
    FORWARD_BEGIN = auto()
    FORWARD_END = auto()
    BACKWARD_BEGIN = auto()
    BACKWARD_END = auto()
    """Forward or backward of a layer over one micro-batch."""
    WORK_BEGIN = auto()
    WORK_END = auto()
    """Work of the engine, which may be nested, or an evaluation."""
    SAVED = auto()
    """Autograd saves a storage for the first time."""
    ASKED = auto()
    """Backward needs a storage. The event comes before any wait or recomputation."""
    ARRIVED = auto()
    """A storage has device memory again: the buffer of a reload, or a recomputed storage."""
    INPUTS = auto()
    """A layer's inputs that it does not save, and would save if it were recomputed whole."""
    FREED = auto()
    """The device memory of a storage is about to be freed."""
    LIKE = auto()
    """A layer runs in a checkpoint, because it is like others that were recorded in the same forward."""


@dataclass(frozen=True, slots=True)
class PassKey:
    """Identifies a pass: a layer over one micro-batch of a step."""

    layer: int
    micro_batch: int

    @property
    def label(self) -> str:
        return f"layers.{self.layer} mb{self.micro_batch}"


@dataclass(eq=False, slots=True)
class SavedStorage:
    """A storage that autograd saved.

    Attributes:
        pass_key, site: the pass and site that saved it first; ``site`` is ``path/ordinal``.
        num_bytes: its size.
        is_input: it is the input of the layer and needs a gradient, so that the whole layer can be recomputed from it.
        has_external_refs: there are other references, or it was emptied, so that offloading would not free it.
        producer: the kind of kernel that recomputes it bit for bit; ``None``: it was not recomputed.
        recompute_inputs: saved storages that recomputing it reads, without parameters.
        intermediates: names of unsaved storages that recomputing it goes through.
        is_intermediate: it is such an unsaved storage itself, which exists only in backward.
    """

    pass_key: PassKey
    site: str
    num_bytes: int
    is_input: bool = False
    has_external_refs: bool = False
    producer: str | None = None
    recompute_inputs: tuple[SavedStorage, ...] = field(default=(), repr=False)
    intermediates: tuple[str, ...] = ()
    is_intermediate: bool = False


@dataclass(eq=False, slots=True)
class NonLayerStorage:
    """A storage that autograd saved outside the layers.

    Attributes:
        chunk, site: the chunk and site that saved it first; ``site`` is ``path/ordinal``.
        num_bytes: its size.
        has_external_refs: there were other references (the chunk's frames, the batch) when a later storage was saved,
            or at the end of the chunk's forward.
        at_ms: times when it was SAVED, first ASKED and FREED, on the clock of ``Event.at_ms``.
    """

    chunk: int
    site: str
    num_bytes: int
    has_external_refs: bool = False
    at_ms: dict[What, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a recording.

    Attributes:
        at_ms: time since the first event, on the compute stream.
        peak_bytes: peak of allocated memory since the previous event.
        now_bytes: allocated memory.
        pass_key: the pass, for FORWARD_BEGIN, FORWARD_END, BACKWARD_BEGIN, BACKWARD_END and LIKE.
        storage, num_bytes: the storage, for SAVED, ASKED, ARRIVED and FREED, and the bytes allocated or freed. For
            INPUTS all of them as one storage, which is none of its own. For FORWARD_BEGIN the bytes saved outside the
            layers so far.
        work, of: for WORK_BEGIN and WORK_END, one of ``WORKS`` and its subject (``layers.3/mlp/0 mb0``), or
            ``EVALUATION``.
        chunk: number of the chunk in model order, for CHUNK_BEGIN and CHUNK_END.
        like: these other layers, for LIKE.
        noting_ms: time after ``at_ms`` that the recorder itself took.
        host_at_ms: time on the host's clock.
    """

    what: What
    at_ms: float
    peak_bytes: int
    now_bytes: int
    pass_key: PassKey | None = None
    storage: SavedStorage | None = None
    num_bytes: int = 0
    work: str = ""
    of: str = ""
    chunk: int = 0
    like: tuple[int, ...] = ()
    noting_ms: float = 0.0
    host_at_ms: float = 0.0


@dataclass(frozen=True)
class Recording:
    """Whole steps: the first event and the last are STEP.

    Attributes:
        reserved_bytes: memory that the allocator had reserved at the end; ``None``: the device has no such allocator.
        non_layer: storages saved outside the layers, in order.
    """

    events: tuple[Event, ...]
    reserved_bytes: int | None = None
    non_layer: tuple[NonLayerStorage, ...] = ()

    @property
    def num_steps(self) -> int:
        return sum(event.what is What.STEP for event in self.events) - 1

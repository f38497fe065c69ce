"""What a recorder has seen of a few training steps, raw: ``planner/profile_builder.py`` makes a profile of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

TRIAL, BRING_BACK, RECOMPUTE = "trial", "bring_back", "recompute"
WORKS = frozenset({"wait", "release", "swap_out", "swap_in", "prefetch", TRIAL, BRING_BACK, RECOMPUTE})
"""What the engine does while a layer runs and the layer alone would not: names of its ranges."""
EVALUATION = "evaluation"
"""Forwards without gradients, between steps: told as work, since neither their time nor their memory is a step's."""


class What(Enum):
    """Of events, in the order of the program."""

    STEP = auto()
    """A step begins, and the one before is over."""
    CHUNK_BEGIN = auto()
    CHUNK_END = auto()
    """Forward of a model chunk, with what stands around its layers."""
    FORWARD_BEGIN = auto()
    FORWARD_END = auto()
    BACKWARD_BEGIN = auto()
    BACKWARD_END = auto()
    """A layer over one micro-batch."""
    WORK_BEGIN = auto()
    WORK_END = auto()
    """The engine's own, nested; or an evaluation."""
    SAVED = auto()
    """Autograd saves a storage for the first time."""
    ASKED = auto()
    """Backward asks for it, before it is waited for or made again."""
    ARRIVED = auto()
    """It has device memory again: a buffer that it is copied into, or made again."""
    FREED = auto()
    """Its device memory is about to be freed."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """A layer over one micro-batch of a step."""

    layer: int
    micro_batch: int

    @property
    def label(self) -> str:
        return f"layers.{self.layer} mb{self.micro_batch}"


@dataclass(eq=False, slots=True)
class SavedStorage:
    """A storage that autograd saved.

    Attributes:
        run, site: where it was saved first; ``site`` is ``path/ordinal``.
        num_bytes: its size.
        is_input: it is the hidden states that the layer was called with, and they need a gradient: the layer could run
            again as a whole, from them.
        has_external_refs: others hold it as well, or have emptied it, so that offloading would not free it.
        producer: the kind of kernel that makes it again to the bit; ``None``: it was not recomputed.
        made_from: what that needs of what was saved, parameters aside.
        through: names of what is made on the way, which nobody saves.
        is_on_the_way: it is of that kind itself, and comes in backward alone.
    """

    run: LayerRun
    site: str
    num_bytes: int
    is_input: bool = False
    has_external_refs: bool = False
    producer: str | None = None
    made_from: tuple[SavedStorage, ...] = field(default=(), repr=False)
    through: tuple[str, ...] = ()
    is_on_the_way: bool = False


@dataclass(eq=False, slots=True)
class NonLayerStorage:
    """A storage that autograd saved outside the layers.

    Attributes:
        chunk, site: where it was saved first; ``site`` is ``path/ordinal``.
        num_bytes: its size.
        has_external_refs: others (frames of the chunk, the batch) held it as well when the last storage behind it was
            saved, or at the chunk's end.
        at_ms: when it was SAVED, first ASKED and FREED, as of an event.
    """

    chunk: int
    site: str
    num_bytes: int
    has_external_refs: bool = False
    at_ms: dict[What, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        at_ms: since the first event, on the compute stream.
        peak_bytes: the most that was allocated since the event before.
        now_bytes: allocated now.
        run: of a layer's beginnings and ends.
        storage, num_bytes: of SAVED, ASKED, ARRIVED, FREED: which, and how much memory comes or goes.
        work, of: of WORK_BEGIN and WORK_END: which of ``WORKS``, and on what (``layers.3/mlp/0 mb0``); or
            ``EVALUATION``.
        chunk: of CHUNK_BEGIN and CHUNK_END, in the order in which the model has them.
        noting_ms: behind ``at_ms``, and the recorder's own.
    """

    what: What
    at_ms: float
    peak_bytes: int
    now_bytes: int
    run: LayerRun | None = None
    storage: SavedStorage | None = None
    num_bytes: int = 0
    work: str = ""
    of: str = ""
    chunk: int = 0
    noting_ms: float = 0.0


@dataclass(frozen=True)
class Recording:
    """Whole steps: the first event and the last are STEP.

    Attributes:
        reserved_bytes: what the allocator held at the end, in use or not; ``None`` where that has no meaning.
        outside: what was saved outside the layers, in order.
    """

    events: tuple[Event, ...]
    reserved_bytes: int | None = None
    non_layer: tuple[NonLayerStorage, ...] = ()

    @property
    def num_steps(self) -> int:
        return sum(event.what is What.STEP for event in self.events) - 1

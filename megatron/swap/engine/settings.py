"""Settings and instruments of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.types import Site, SwapError
from megatron.swap.engine.decision import Decision
from megatron.swap.engine.wrapper_tensors import WrapperRules
from megatron.swap.profiling.observer import Observer
from megatron.swap.profiling.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The user's settings.

    Attributes:
        window_bytes: most bytes that are reloaded ahead of their layer's backward, and most that still wait for their
            release when a forward ends (0 if it ends in the loss); ``None``: the bytes of the largest group.
        verify: compare checksums of every reloaded or recomputed storage.
        recomputes: the policy may choose RECOMPUTE, and producers record their outputs.
        wrappers: the wrapper tensors that are taken apart; ``None``: all are kept whole.
    """

    window_bytes: int | None = None
    verify: bool = False
    recomputes: bool = False
    wrappers: WrapperRules | None = None


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """Observers and listeners of the engine.

    Attributes:
        ranges: names the engine's work for a profiler.
        observer: counts the bytes that autograd holds.
        recorder: records saved storages while it is on.
        on_saved: called for every saved tensor that has a site, with the site, the storage and the decision.
        on_full: called when the tier has no room for a storage, which is kept then; ``None``: that is an error.
    """

    ranges: Ranges = field(default_factory=Ranges)
    observer: Observer | None = None
    recorder: Recorder | None = None
    on_saved: Callable[[Site, torch.UntypedStorage, Decision], None] | None = None
    on_full: Callable[[SwapError], None] | None = None

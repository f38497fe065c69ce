"""What an engine is built from, besides its device, tier and policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.types import Site, SwapError
from megatron.swap.engine.decision import Decision
from megatron.swap.profiling.observer import Observer
from megatron.swap.profiling.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The choices of a user.

    Attributes:
        window_bytes: most bytes that are reloaded ahead of their layer's backward, and most that still wait for their
            release when a forward ends (none, where it ends in the loss); ``None``: as many as the largest group has.
        verify: compare checksums of every storage that is reloaded or recomputed.
        recomputes: the policy may answer RECOMPUTE, and producers record what they make.
    """

    window_bytes: int | None = None
    verify: bool = False
    recomputes: bool = False


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """Those who watch the engine, or hear of what it does.

    Attributes:
        ranges: names the engine's work for a profiler.
        observer: counts the bytes that autograd holds.
        recorder: records saved storages while it is on.
        on_saved: called with every saved tensor that has a site: the site, its storage, what was decided.
        on_full: called when the tier has no room for a storage, which is kept then; ``None``: that is an error.
    """

    ranges: Ranges = field(default_factory=Ranges)
    observer: Observer | None = None
    recorder: Recorder | None = None
    on_saved: Callable[[Site, torch.UntypedStorage, Decision], None] | None = None
    on_full: Callable[[SwapError], None] | None = None

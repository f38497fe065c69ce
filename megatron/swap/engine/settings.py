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
    """The user's settings."""

    # The most bytes that are reloaded ahead of their layer's backward, and the most that wait for their release when a
    # forward ends (0 if it ends in the loss). None for the bytes of the largest group.
    window_bytes: int | None = None
    verify: bool = False  # compare checksums of every reloaded or recomputed storage
    recomputes: bool = False  # the policy may choose RECOMPUTE, and producers record their outputs
    wrappers: WrapperRules | None = None  # wrapper tensors that are taken apart; None to keep all whole


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """Observers and listeners of the engine."""

    ranges: Ranges = field(default_factory=Ranges)  # names the engine's work for a profiler
    observer: Observer | None = None  # counts the bytes that autograd holds
    recorder: Recorder | None = None  # records saved storages while it is on
    # Called for every saved tensor that has a site.
    on_saved: Callable[[Site, torch.UntypedStorage, Decision], None] | None = None
    # Called when the tier has no room for a storage, which is kept. None makes this an error.
    on_full: Callable[[SwapError], None] | None = None

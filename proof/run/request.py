"""What one measured run is to do, as its process is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """One training run. ``flags`` are those of pretrain_gpt_swap.py."""

    flags: tuple[str, ...]
    num_warm_up: int
    """Steps before the timed ones, at least 2: the run is held after the first."""
    timed_limit_s: float | None = None
    """End the run once its timed steps took so long, two at the least: the slow ones need no more."""
    env: dict[str, str] = field(default_factory=dict)
    wrap: str | None = None
    """``module:function`` that gets the built model chunks before they are wrapped for data parallelism."""
    requires: tuple[str, ...] = ()
    """Modules that are imported before the run is ready."""
    has_phases: bool = False
    """Time forward and backward on the device too (unswapped runs without recomputation)."""
    profile_step: int = 0
    """Trace this step (1-based) with torch.profiler and leave it out of the timed ones; 0: none."""
    has_summary: bool = False
    """Take ``--swap-summary`` (its observer hooks every saved tensor) and the weights' hash along."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Request:
        fields: dict[str, Any] = json.loads(text)
        return Request(**{**fields, "flags": tuple(fields["flags"]), "requires": tuple(fields["requires"])})

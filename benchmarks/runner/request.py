"""The request that the process of a measured run reads."""

from dataclasses import dataclass, field


class NotReady(Exception):
    """A run cannot begin yet; the message says what is missing and where it comes from."""


@dataclass(frozen=True)
class Request:
    """One training run. `flags` are those of pretrain_gpt_swap.py."""

    flags: tuple[str, ...]
    num_warm_up: int  # Steps before the timed ones, at least 2: the run waits after the first
    num_timed: int | None = None  # End the run after this many timed steps; `None`: after all steps of `flags`
    timed_limit_s: float | None = None  # End the run once its timed steps took this long, but not before two of them
    env: dict[str, str] = field(default_factory=dict)
    wrap: str | None = None
    """``module:function``, called with the built model chunks before they are wrapped for data parallelism."""
    requires: tuple[str, ...] = ()  # Modules that are imported before the run is ready
    has_phases: bool = False  # Time forward and backward on the device too (unswapped runs without recomputation)
    has_summary: bool = False
    """Whether to read `--swap-summary` (its observer hooks every saved tensor) and hash the weights."""
    observes: bool = False
    """Count the bytes of saved tensors, the only peak without a GPU (`--swap-summary`, whose hooks take host time)."""
    sequence_schedule: tuple[tuple[int, int], ...] = ()
    """Numbers of steps and their sequence lengths, repeated; empty: the length of `flags`."""

"""Policies of a run that plans itself: one that holds as little as it can, and one that changes between steps."""

from __future__ import annotations

from collections.abc import Collection

from megatron.swap.policy import Policy
from megatron.swap.types import Action, Site


class SafePolicy(Policy):
    """Holds as little as it can: what a kernel can make again is recomputed, everything else is swapped.

    Args:
        min_bytes: smaller storages stay.
        recompute: producers whose outputs may be recomputed.
    """

    def __init__(self, min_bytes: int, recompute: Collection[str]) -> None:
        self._min_bytes = min_bytes
        self._recompute = frozenset(recompute)

    def swaps_layer(self, layer: int) -> bool:
        return True

    def recomputes_layer(self, layer: int) -> bool:
        return bool(self._recompute)

    def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
        if num_bytes < self._min_bytes:
            return Action.KEEP
        return Action.RECOMPUTE if producer in self._recompute else Action.SWAP


class SwitchingPolicy(Policy):
    """Answers as another policy does, which may be exchanged between steps.

    Args:
        first: the policy to begin with.
        min_bytes: smaller storages stay, also when memory is short.

    Attributes:
        is_short: the step that runs saves more than was planned for: what would be kept is swapped, until it is over.
            (Nothing more is recomputed: what one rank does alone must not take part in what several do together.)
    """

    def __init__(self, first: Policy, min_bytes: int) -> None:
        self._inner = first
        self._min_bytes = min_bytes
        self._keeps_all = False
        self.is_short = False

    def follow(self, policy: Policy, keeps_all: bool = False) -> None:
        """From the next forward on answer as ``policy``. ``keeps_all``: it moves nothing and recomputes nothing."""
        self._inner = policy
        self._keeps_all = keeps_all
        self.is_short = False

    @property
    def is_idle(self) -> bool:
        return self._keeps_all and not self.is_short

    def swaps_layer(self, layer: int) -> bool:
        return self._inner.swaps_layer(layer)

    def recomputes_layer(self, layer: int) -> bool:
        return self._inner.recomputes_layer(layer)

    def recomputes_whole(self, layer: int) -> bool:
        return self._inner.recomputes_whole(layer)

    def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
        action = self._inner.action(site, num_bytes, producer)
        if self.is_short and action is Action.KEEP and num_bytes >= self._min_bytes:
            return Action.SWAP
        return action

"""Policies of a run that plans itself: one that keeps as little as it can, and one that changes between steps."""

from collections.abc import Collection

from megatron.swap.common.plan import Plan
from megatron.swap.common.types import Action, Site
from megatron.swap.engine.policy import PlanPolicy, Policy


class SafePolicy(Policy):
    """Keeps as little as it can: recomputes outputs of single kernels, and swaps all other storages."""

    def __init__(self, min_bytes: int, recompute: Collection[str]) -> None:
        self.min_bytes = min_bytes
        self._recompute = frozenset(recompute)

    def swaps_layer(self, layer: int) -> bool:
        return True

    def recomputes_layer(self, layer: int) -> bool:
        return bool(self._recompute)

    def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
        if num_bytes < self.min_bytes:
            return Action.KEEP
        return Action.RECOMPUTE if producer in self._recompute else Action.SWAP


class SwitchingPolicy(Policy):
    """Answers by a plan that may be exchanged between steps, or by ``safe`` while there is none."""

    def __init__(self, safe: Policy, min_bytes: int) -> None:
        self._safe = self._inner = safe
        self._min_swapped_bytes = min_bytes
        self.min_bytes = safe.min_bytes
        self._keeps_all = False
        # True while a step saves more than its plan expects: storages that the plan keeps are swapped until it ends.
        # Nothing more is recomputed, since recomputation may take part in collectives, which all ranks must join.
        self.is_short = False

    def apply_plan(self, plan: Plan | None) -> None:
        """Answer by ``plan`` from the next forward on; None: by the safe policy."""
        self._inner = self._safe if plan is None else PlanPolicy(plan)
        self.min_bytes = self._inner.min_bytes
        self._keeps_all = plan is not None and plan.keeps_all
        self.is_short = False

    @property
    def is_idle(self) -> bool:
        return self._keeps_all and not self.is_short

    @property
    def is_repeatable(self) -> bool:
        return not self.is_short

    def swaps_layer(self, layer: int) -> bool:
        return self._inner.swaps_layer(layer)

    def recomputes_layer(self, layer: int) -> bool:
        return self._inner.recomputes_layer(layer)

    def recomputes_whole(self, layer: int) -> bool:
        return self._inner.recomputes_whole(layer)

    def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
        action = self._inner.action(site, num_bytes, producer)
        if self.is_short and action is Action.KEEP and num_bytes >= self._min_swapped_bytes:
            return Action.SWAP
        return action

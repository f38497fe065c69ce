"""Decides about each storage that may be offloaded or recomputed.

Parameters, tensors that are not plain and a layer that keeps everything never get here. An offload may be cancelled
later: `offload` keeps a storage that has external references or was changed, `reload` one that backward needs before
its release.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch

from megatron.swap.common.types import Action, LayerPosition, Site
from megatron.swap.devices.plain_tensors import is_plain
from megatron.swap.engine.decision import KEEP, KEEP_SMALL, RECOMPUTE, Decision, Reason
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.release_budget import ReleaseBudget

MAX_REFUSALS = 2  # Keep a site after this many failed releases in a row: its copies would free nothing.


class Recomputability(Protocol):
    """Reports which storages of the running layer can be recomputed: the ``Recomputer``."""

    def producer_of(self, storage: torch.UntypedStorage) -> str | None: ...
    def obstacle(self, site: Site, storage: torch.UntypedStorage) -> Reason | None: ...


def is_ineligible(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a saved tensor is always kept: of a subclass, on another device, or not described by its layout alone."""
    return (
        type(tensor) is not torch.Tensor
        or tensor.device != device
        or not is_plain(tensor)
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.numel() == 0
    )


class Decider:
    """Asks the policy, and overrides its answer where necessary."""

    def __init__(self, policy: Policy, release_budget: ReleaseBudget) -> None:
        self._policy = policy
        self._release_budget = release_budget
        self._num_refusals: Counter[Site] = Counter()

    def decide(
        self, site: Site, storage: torch.UntypedStorage, position: LayerPosition, current: Decision | None = None,
        recomputability: Recomputability | None = None,
    ) -> Decision:  # fmt: skip
        """Return the decision for ``storage``: autograd saves a tensor on it at ``site``.

        ``current``, the decision of an earlier save, holds unless this tensor is recomputed. Nothing is recomputed
        without ``recomputability``.
        """
        if current is not None and recomputability is None:
            return current  # with ``recomputability`` this tensor may be recomputed, though another was offloaded
        num_bytes = storage.nbytes()
        producer = None if recomputability is None else recomputability.producer_of(storage)
        action, reason = self._policy.action(site, num_bytes, producer), Reason.POLICY
        if action is Action.KEEP and current is None:
            return KEEP_SMALL if num_bytes < self._policy.min_bytes else KEEP
        if action is Action.RECOMPUTE:
            obstacle = Reason.NOT_RECOMPUTED if recomputability is None else recomputability.obstacle(site, storage)
            if obstacle is None:
                return RECOMPUTE
            action, reason = self._policy.action_without_recompute(site, num_bytes), obstacle
        if current is not None:
            return current
        if action is Action.SWAP:
            override = self._reason_to_keep(site, num_bytes, position)
            return Decision(action, reason) if override is None else Decision(Action.KEEP, override)
        return Decision(Action.KEEP, reason)  # for the obstacle

    def decide_again(
        self, decision: Decision, site: Site, storage: torch.UntypedStorage, position: LayerPosition
    ) -> Decision:
        """Return ``decision`` for another ``storage`` at its site, unless it is overridden now."""
        if decision.action is not Action.SWAP:
            return decision
        override = self._reason_to_keep(site, storage.nbytes(), position)
        return decision if override is None else Decision(Action.KEEP, override)

    @property
    def is_repeatable(self) -> bool:
        """Whether the policy gives its earlier answers, in the layer that begins."""
        return self._policy.is_repeatable

    def recomputes_layer(self, layer: int) -> bool:
        """Whether the policy may recompute saved tensors of ``layer``."""
        return self._policy.recomputes_layer(layer)

    def may_recompute(self, site: Site, num_bytes: int, producer: str) -> bool:
        """Whether the policy allows recomputing an unsaved input of the storage that is saved at ``site``."""
        return self._policy.action(site, num_bytes, producer) is Action.RECOMPUTE

    def record_kept(self, site: Site, reason: Reason) -> None:
        """Count a cancelled offload at ``site``. A full tier does not count: it may have room the next time."""
        self._num_refusals[site] += reason is not Reason.TIER_FULL

    def record_release(self, site: Site) -> None:
        """Note a release at ``site``, which ends its row of refusals."""
        self._num_refusals.pop(site, None)

    def apply_policy(self) -> None:
        """Forget the refusals, because the policy has changed."""
        self._num_refusals.clear()

    def _reason_to_keep(self, site: Site, num_bytes: int, position: LayerPosition) -> Reason | None:
        """Return why a storage is kept although the policy offloads it, or None if it is offloaded."""
        if num_bytes == 0:
            return Reason.EMPTY
        if position.is_trailing_kept(self._release_budget.window_groups):
            return Reason.TRAILING_LAYER
        return Reason.REFUSED_BEFORE if self._num_refusals[site] >= MAX_REFUSALS else None

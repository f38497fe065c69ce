"""The one place where it is decided what happens with a storage that autograd saves.

Later an offload may still be given up: `offload` keeps a storage that others refer to or that was changed, and `reload`
one that backward needs before its release.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch

from megatron.swap.common.types import Action, LayerPosition, Site
from megatron.swap.engine.decision import RECOMPUTE, Decision, Reason
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.release_budget import ReleaseBudget

MAX_REFUSALS = 2
"""A site whose storage could not be released this often in a row is kept, instead of being copied in vain."""


class Recomputability(Protocol):
    """Knows which storages of the running layer could be recomputed."""

    def producer_of(self, storage: torch.UntypedStorage) -> str | None:
        """Return the kind of kernel that made ``storage``; ``None``: it is not known."""
        ...

    def obstacle(self, site: Site, storage: torch.UntypedStorage) -> Reason | None:
        """Return why ``storage``, saved at ``site``, cannot be recomputed, and count that; ``None``: it can."""
        ...


def is_ineligible(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a saved tensor is left alone: parameters, other devices, subclasses, anything without plain bytes."""
    return (
        type(tensor) is not torch.Tensor
        or tensor.device != device
        or tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.numel() == 0
    )


class Decider:
    """The only part that asks the policy, and the only one that overrides it.

    Args:
        policy: what the user, or a plan, wants.
        release_budget: says how many groups the prefetch window holds; that many trailing layers are kept.
    """

    def __init__(self, policy: Policy, release_budget: ReleaseBudget) -> None:
        self._policy = policy
        self._release_budget = release_budget
        self._num_refusals: Counter[Site] = Counter()

    def decide(
        self,
        site: Site,
        storage: torch.UntypedStorage,
        position: LayerPosition,
        current: Decision | None = None,
        recomputability: Recomputability | None = None,
    ) -> Decision:
        """Return what happens with ``storage``, of which autograd saves a tensor at ``site``.

        Args:
            position: of the layer that saves it.
            current: what was decided when it was saved before, if its handle still has it: that holds, unless the
                storage can be recomputed.
            recomputability: ``None``: the storage cannot be recomputed.
        """
        if current is not None and recomputability is None:
            return current  # otherwise this tensor may be recomputed, even if another on the storage was offloaded
        num_bytes = storage.nbytes()
        producer = None if recomputability is None else recomputability.producer_of(storage)
        action, reason = self._policy.action(site, num_bytes, producer), Reason.POLICY
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
        if reason is Reason.POLICY and num_bytes < self._policy.min_bytes:
            reason = Reason.BELOW_MIN_SIZE
        return Decision(Action.KEEP, reason)

    def may_recompute(self, site: Site, num_bytes: int, producer: str) -> bool:
        """Whether the policy allows to recompute what nobody saves, an input of what is saved at ``site``."""
        return self._policy.action(site, num_bytes, producer) is Action.RECOMPUTE

    def record_kept(self, site: Site, reason: Reason) -> None:
        """A storage of ``site`` was to be offloaded and is kept; next time there may be room, but the rest recurs."""
        self._num_refusals[site] += reason is not Reason.TIER_FULL

    def record_release(self, site: Site) -> None:
        """A storage of ``site`` was offloaded and released: only refusals in a row count."""
        self._num_refusals.pop(site, None)

    def apply_policy(self) -> None:
        """Forget the refusals: the policy answers otherwise from now on."""
        self._num_refusals.clear()

    def _reason_to_keep(self, site: Site, num_bytes: int, position: LayerPosition) -> Reason | None:
        """Return why a storage that the policy wants to offload is kept; ``None``: it is offloaded."""
        if num_bytes == 0:
            return Reason.EMPTY
        if position.is_trailing_kept(self._release_budget.window_groups):
            return Reason.TRAILING_LAYER
        return Reason.REFUSED_BEFORE if self._num_refusals[site] >= MAX_REFUSALS else None

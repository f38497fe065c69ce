"""Policies: choose keep, swap or recompute for each site."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from megatron.swap.common.plan import LAYER_SECTION, Plan
from megatron.swap.common.settings import Settings, parse_layers
from megatron.swap.common.site_paths import CHECKPOINT_PATH
from megatron.swap.common.types import MIB, Action, Site


class Policy(ABC):
    """Chooses the action for every tensor that autograd saves in a layer. It is called often and must be cheap."""

    min_bytes: int = 0  # smaller storages are kept, if `action` asks for that; other policies leave it 0

    @abstractmethod
    def swaps_layer(self, layer: int) -> bool:
        """Whether any site of ``layer`` may be swapped."""

    @abstractmethod
    def recomputes_layer(self, layer: int) -> bool:
        """Whether any site of ``layer`` may be recomputed."""

    def recomputes_whole(self, layer: int) -> bool:
        """Whether ``layer`` is recomputed whole; its input is a site too (path ``checkpoint``)."""
        return False

    @property
    def is_idle(self) -> bool:
        """Whether the next forward keeps everything, so that layers may run without hooks."""
        return False

    @property
    def is_repeatable(self) -> bool:
        """Whether the next forward gets the answers of earlier forwards to equal questions."""
        return True

    @abstractmethod
    def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
        """Return the action for the storage of ``num_bytes`` that was saved at ``site``.

        ``producer``, the kind of kernel that can recompute the storage (``PRODUCERS``), matters only for RECOMPUTE.
        Between KEEP and SWAP the site decides.
        """

    def action_without_recompute(self, site: Site, num_bytes: int) -> Action:
        """Return KEEP or SWAP for a storage of ``num_bytes`` that was saved at ``site`` and cannot be recomputed."""
        action = self.action(site, num_bytes)
        if action is Action.RECOMPUTE:
            # Offload, so that device memory stays as low as requested. A layer that swaps nothing keeps the storage.
            return Action.SWAP if self.swaps_layer(site.layer) else Action.KEEP
        return action


class ManualPolicy(Policy):
    """The flags' policy: ``layers`` swap ``modules``, or all if empty; all recompute the producers in ``recompute``."""

    def __init__(
        self, layers: Collection[int], modules: Sequence[str], min_bytes: int, recompute: Collection[str] = ()
    ) -> None:
        self._layers = frozenset(layers)
        self._modules = tuple(modules)
        self.min_bytes = min_bytes
        self._recompute = frozenset(recompute)
        self._verdicts: dict[str, bool] = {}

    def swaps_layer(self, layer: int) -> bool:
        return layer in self._layers

    def recomputes_layer(self, layer: int) -> bool:
        return bool(self._recompute)

    def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
        if num_bytes < self.min_bytes:
            return Action.KEEP
        if producer in self._recompute:
            return Action.RECOMPUTE
        if site.layer not in self._layers:
            return Action.KEEP
        return Action.SWAP if self._chosen(site.path) else Action.KEEP

    def _chosen(self, path: str) -> bool:
        if not self._modules:
            return True
        if path not in self._verdicts:
            self._verdicts[path] = any(matches(pattern, path) for pattern in self._modules)
        return self._verdicts[path]


class PlanPolicy(Policy):
    """The policy of a plan, site by site. Sites that the plan does not name are kept; sizes do not matter."""

    def __init__(self, plan: Plan) -> None:
        layers = plan.layers()
        self._sites = {layer: plan.sites(layer) for layer in layers}
        self._swaps = frozenset(filter(plan.swaps_layer, layers))
        self._recomputes = frozenset(filter(plan.recomputes_layer, layers))
        self._whole = frozenset(layer for layer in layers if LAYER_SECTION in plan.sections(layer))

    def swaps_layer(self, layer: int) -> bool:
        return layer in self._swaps

    def recomputes_layer(self, layer: int) -> bool:
        return layer in self._recomputes

    def recomputes_whole(self, layer: int) -> bool:
        return layer in self._whole

    def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
        if site.path == CHECKPOINT_PATH and site.layer in self._whole:
            return Action.SWAP if site.layer in self._swaps else Action.KEEP  # the layer saves nothing but its input
        named = self._sites.get(site.layer)
        return named.get(f"{site.path}/{site.ordinal}", Action.KEEP) if named else Action.KEEP


def policy_of(settings: Settings, num_layers: int) -> Policy:
    """Return the policy of settings that need no measurement, for a model of ``num_layers``."""
    if settings.plan is not None:
        return PlanPolicy(settings.plan)
    layers = parse_layers(settings.layers, num_layers)
    return ManualPolicy(layers, settings.modules, int(settings.min_mib * MIB), settings.recompute)


def matches(pattern: str, path: str) -> bool:
    """Whether ``pattern`` (``core_attention``, ``mlp.linear_fc1``) names ``path`` or a module around it."""
    wanted, parts = pattern.split("."), path.split(".")
    return any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1))

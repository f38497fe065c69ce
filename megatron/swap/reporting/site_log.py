"""What became of every saved tensor: to compare with a plan, or to be written as one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron.swap.common.layer_ranges import format_ranges
from megatron.swap.common.plan import ACTIONS, LAYER_SECTION, Model, Plan, PlanClass, SitePlan
from megatron.swap.common.types import MIB, Action, Site, format_bytes
from megatron.swap.engine.decision import Decision

STALE = 0.05
"""A size that differs by more than this part from the plan's is told."""

MOST_NAMED = 6
"""Sites that a line names; the others are counted."""


@dataclass(frozen=True)
class Seen:
    """A storage at the site that saved it first: the most bytes it had there, and what happened to the last one."""

    num_bytes: int
    action: Action


class SiteLog:
    """Told of every saved tensor of the layers whose sites have names; ``sites`` are in the order they were first met.

    A storage counts where it is saved first, however often it is saved while it lives.
    """

    def __init__(self) -> None:
        self.sites: dict[Site, Seen] = {}
        self._alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def note(self, site: Site, storage: torch.UntypedStorage, decision: Decision) -> None:
        """``storage`` was saved at ``site``, and this was done with it."""
        if storage._cdata in self._alive:
            return
        self._alive[storage._cdata] = storage
        before = self.sites.get(site)
        self.sites[site] = Seen(max(storage.nbytes(), before.num_bytes if before else 0), decision.action)


def unlike_plan(plan: Plan, seen: Mapping[Site, Seen], min_bytes: int) -> list[str]:
    """Lines on where a run is not what its plan was made for; only layers that ``seen`` has something of.

    Args:
        seen: at least one whole step.
        min_bytes: sites that the plan does not name are no matter below this size.
    """
    missing: dict[str, list[int]] = {}
    unknown: dict[str, list[int]] = {}
    stale: dict[str, list[int]] = {}
    for layer in sorted({site.layer for site in seen}):
        planned = plan.planned(layer)
        here = {f"{site.path}/{site.ordinal}": found for site, found in seen.items() if site.layer == layer}
        for name, wanted in planned.items():
            # What a layer that runs again would have saved at other sites is listed for people.
            acts = wanted.action != "keep" and LAYER_SECTION not in plan.sections(layer)
            if name not in here and acts:
                missing.setdefault(name, []).append(layer)
        for name, found in here.items():
            if name not in planned:
                if LAYER_SECTION in plan.sections(layer):
                    continue  # its input, whose name is another one when the layer does not run again
                if found.num_bytes >= min_bytes:
                    unknown.setdefault(f"{name} ({format_bytes(found.num_bytes)})", []).append(layer)
                continue
            mib = planned[name].mib
            if mib is not None and abs(found.num_bytes / MIB - mib) > STALE * mib:
                sizes = f"{name} ({format_bytes(found.num_bytes)}, planned {format_bytes(mib * MIB)})"
                stale.setdefault(sizes, []).append(layer)
    return [
        *_lines("planned, but nothing was saved there", missing),
        *_lines("saved, but not in the plan, so kept", unknown),
        *_lines("of another size than planned, so what the plan predicts does not hold", stale),
    ]


def plan_of_run(model: Model, seen: Mapping[Site, Seen], plan: Plan | None) -> Plan:
    """What was done, as a plan: doing it again does the same.

    Args:
        seen: of all ranks.
        plan: what the run was told to do, if that was a plan: for the layers that stand in no log.
    """
    names = {action: name for name, action in ACTIONS.items()}
    of_layer: dict[int, dict[str, SitePlan]] = {}
    for site, found in seen.items():
        mib = round(found.num_bytes / MIB, 6)
        of_layer.setdefault(site.layer, {})[f"{site.path}/{site.ordinal}"] = SitePlan(names[found.action], mib)  # type: ignore[arg-type]
    for layer in plan.layers() if plan else ():
        if plan and layer not in of_layer:  # nobody looks into layers of which everything is kept
            kept = {name: planned for name, planned in plan.planned(layer).items() if planned.action == "keep"}
            of_layer[layer] = kept
    alike: dict[tuple, list[int]] = {}
    for layer, sites in sorted(of_layer.items()):
        alike.setdefault((tuple(sites.items()), plan.sections(layer) if plan else ()), []).append(layer)
    classes = (PlanClass(format_ranges(layers), dict(sites), sections) for (sites, sections), layers in alike.items())
    return Plan(model, None, None, None, tuple(classes), plan.prefetch_gib if plan else None)


def merged(logs: Iterable[Mapping[Site, Seen]]) -> dict[Site, Seen]:
    """The logs of several ranks as one: ranks that have the same layer do the same, sizes are the largest."""
    together: dict[Site, Seen] = {}
    for log in logs:
        for site, found in log.items():
            if site not in together or found.num_bytes > together[site].num_bytes:
                together[site] = found
    return together


def _lines(what: str, sites: Mapping[str, list[int]]) -> list[str]:
    """One line for all layers that have the same to say."""
    of_layers: dict[str, list[str]] = {}
    for name, layers in sites.items():
        of_layers.setdefault(format_ranges(layers), []).append(name)
    return [
        f"layers {layers}: {what}: {', '.join(names[:MOST_NAMED])}"
        + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
        for layers, names in of_layers.items()
    ]

"""Log of the decisions about every saved tensor, to compare with a plan or to write as a plan."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron.swap.common.layer_ranges import format_ranges
from megatron.swap.common.plan import ACTIONS, LAYER_SECTION, Model, Plan, PlanClass, SitePlan
from megatron.swap.common.types import MIB, Action, Site, format_bytes
from megatron.swap.engine.decision import Decision

STALE_FRACTION = 0.05  # relative difference from which on a size is reported as unlike its plan

MAX_NAMED_SITES = 6  # sites that a line names; the others are only counted


@dataclass(frozen=True)
class Seen:
    """Storages that a site was the first to save: the most bytes of one, and the action for the last one."""

    num_bytes: int
    action: Action


class SiteLog:
    """Logs saved tensors by site. A storage counts only at the site that saves it first while it lives."""

    def __init__(self) -> None:
        self.sites: dict[Site, Seen] = {}  # what was seen at each site, in the order of first use
        self._alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def note(self, site: Site, storage: torch.UntypedStorage, decision: Decision) -> None:
        """Note that ``storage`` was saved at ``site``, and the decision about it."""
        if storage._cdata in self._alive:
            return
        self._alive[storage._cdata] = storage
        before = self.sites.get(site)
        self.sites[site] = Seen(max(storage.nbytes(), before.num_bytes if before else 0), decision.action)


def unlike_plan(plan: Plan, seen: Mapping[Site, Seen], min_bytes: int) -> list[str]:
    """Return lines for users on differences between a run and the measurements behind its plan.

    Args:
        seen: log of at least one whole step. Layers without an entry are not compared.
        min_bytes: smaller sites that the plan does not name are ignored.
    """
    missing: dict[str, list[int]] = {}
    unknown: dict[str, list[int]] = {}
    stale: dict[str, list[int]] = {}
    for layer in sorted({site.layer for site in seen}):
        planned = plan.planned(layer)
        here = {f"{site.path}/{site.ordinal}": found for site, found in seen.items() if site.layer == layer}
        for name, wanted in planned.items():
            # A layer that is recomputed whole saves only its input; the plan lists its other sites for people.
            is_needed = wanted.action != "keep" and LAYER_SECTION not in plan.sections(layer)
            if name not in here and is_needed:
                missing.setdefault(name, []).append(layer)
        for name, found in here.items():
            if name not in planned:
                if LAYER_SECTION in plan.sections(layer):
                    continue  # its input, which has another name if the layer is not recomputed whole
                if found.num_bytes >= min_bytes:
                    unknown.setdefault(f"{name} ({format_bytes(found.num_bytes)})", []).append(layer)
                continue
            mib = planned[name].mib
            if mib is not None and abs(found.num_bytes / MIB - mib) > STALE_FRACTION * mib:
                sizes = f"{name} ({format_bytes(found.num_bytes)}, planned {format_bytes(mib * MIB)})"
                stale.setdefault(sizes, []).append(layer)
    return [
        *_lines("planned, but nothing was saved there", missing),
        *_lines("saved, but not in the plan, so kept", unknown),
        *_lines("of another size than planned, so what the plan predicts does not hold", stale),
    ]


def plan_of_run(model: Model, seen: Mapping[Site, Seen], plan: Plan | None) -> Plan:
    """Return the decisions of a run as a plan that repeats them.

    ``plan``: followed by the run, if any. It fills in layers without a log entry.
    """
    names = {action: name for name, action in ACTIONS.items()}
    of_layer: dict[int, dict[str, SitePlan]] = {}
    for site, found in seen.items():
        mib = round(found.num_bytes / MIB, 6)
        of_layer.setdefault(site.layer, {})[f"{site.path}/{site.ordinal}"] = SitePlan(names[found.action], mib)  # type: ignore[arg-type]
    for layer in plan.layers() if plan else ():
        if plan and layer not in of_layer:  # layers that keep everything have no hooks, so no log
            kept = {name: planned for name, planned in plan.planned(layer).items() if planned.action == "keep"}
            of_layer[layer] = kept
    alike: dict[tuple, list[int]] = {}
    for layer, sites in sorted(of_layer.items()):
        alike.setdefault((tuple(sites.items()), plan.sections(layer) if plan else ()), []).append(layer)
    classes = (PlanClass(format_ranges(layers), dict(sites), sections) for (sites, sections), layers in alike.items())
    return Plan(model, None, None, None, tuple(classes), plan.prefetch_gib if plan else None)


def merged(logs: Iterable[Mapping[Site, Seen]]) -> dict[Site, Seen]:
    """Merge the logs of several ranks. Ranks that share a layer do the same with it; the largest size counts."""
    together: dict[Site, Seen] = {}
    for log in logs:
        for site, found in log.items():
            if site not in together or found.num_bytes > together[site].num_bytes:
                together[site] = found
    return together


def _lines(what: str, sites: Mapping[str, list[int]]) -> list[str]:
    """Return a line for each set of layers that the same sites concern."""
    of_layers: dict[str, list[str]] = {}
    for name, layers in sites.items():
        of_layers.setdefault(format_ranges(layers), []).append(name)
    return [
        f"layers {layers}: {what}: {', '.join(names[:MAX_NAMED_SITES])}"
        + (f" and {len(names) - MAX_NAMED_SITES} more" if len(names) > MAX_NAMED_SITES else "")
        for layers, names in of_layers.items()
    ]

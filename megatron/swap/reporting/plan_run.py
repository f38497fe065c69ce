"""A run and its plan: a log of the decisions about every saved tensor, compared with a plan, or saved as a plan."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron.swap.common.collectives import gather
from megatron.swap.common.layer_ranges import format_ranges
from megatron.swap.common.plan import ACTIONS, LAYER_SECTION, Model, Plan, PlanClass, SitePlan, save_plan
from megatron.swap.common.settings import Settings
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
        self.sites: dict[Site, Seen] = {}  # in the order of first use
        self._alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def note(self, site: Site, storage: torch.UntypedStorage, decision: Decision) -> None:
        if storage._cdata in self._alive:
            return
        self._alive[storage._cdata] = storage
        before = self.sites.get(site)
        self.sites[site] = Seen(max(storage.nbytes(), before.num_bytes if before else 0), decision.action)


def unlike_plan(plan: Plan, seen: Mapping[Site, Seen], min_bytes: int) -> list[str]:
    """Return lines for users on differences between a whole step and the measurements behind its plan."""
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
                if found.num_bytes >= min_bytes:  # smaller sites may be missing in a plan
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
    """Return the decisions of a run as a plan that repeats them. ``plan``: followed by the run, if any."""
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


class PlanRun:
    """Watches the decisions about saved tensors, as long as a comparison with a plan or a file needs them."""

    def __init__(self, settings: Settings, describe: Callable[[], Model]) -> None:
        self._settings = settings
        self._describe = describe  # called at the end of training: returns the model that a saved plan is for
        self._log: SiteLog | None = SiteLog()
        self._num_steps = 0

    def note(self, site: Site, storage: torch.UntypedStorage, decision: Decision) -> None:
        if self._log is not None:
            self._log.note(site, storage, decision)

    def step_ended(self) -> list[str]:
        """Return lines on differences between run and plan, after the first step alone."""
        self._num_steps += 1
        plan = self._settings.plan
        if self._num_steps > 1 or plan is None or self._log is None:
            return []
        lines = unlike_plan(plan, self._log.sites, int(self._settings.min_mib * MIB))
        if self._settings.save_plan is None:
            self._log = None
        return [f"--swap-plan: {line}" for line in lines]

    def save(self) -> list[str]:
        """Save the plan if the settings ask for it, or return a line why not. Call it on all ranks; rank 0 writes."""
        if self._settings.save_plan is None or self._log is None:
            return []
        logs = gather(self._log.sites)
        if logs is None:
            return []
        try:
            save_plan(plan_of_run(self._describe(), merged(logs), self._settings.plan), self._settings.save_plan)
        except OSError as error:  # must not end the run: its last checkpoint is still to be written
            return [f"--swap-save-plan was not written: {error}"]
        return []

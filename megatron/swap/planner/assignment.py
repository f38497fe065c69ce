"""The effect of a plan on each layer of a profile: saves, uses, frees and recomputations, with their times."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from megatron.swap.common.plan import LAYER_SECTION, Plan
from megatron.swap.common.types import Action, UsageError
from megatron.swap.planner.host_time import forward_host_ms
from megatron.swap.planner.profile import UNKNOWN, LayerClass, ModelFigures, Profile, Section, SiteProfile


@dataclass(frozen=True)
class Recomputation:
    at_ms: float  # its results are needed; it runs right before
    cost_ms: float
    mib: float  # of its results
    peak_mib: float = 0.0  # held in addition while it runs


@dataclass(frozen=True)
class _RecomputeUnit:
    """One site, or a section, that is recomputed at once."""

    frees: tuple[str, ...]  # sites that it recomputes
    needs: tuple[str, ...]  # sites that it reads
    cost_ms: float
    peak_mib: float = 0.0


@dataclass(frozen=True)
class LayerScript:
    forward_ms: float
    backward_ms: float
    saves: tuple[tuple[float, float, Action], ...]  # (saved_at_ms, mib, action) in forward
    beside: tuple[float, ...]  # for each save, the peak of forward since the save before, in MiB beside saved tensors
    gone: tuple[float, ...]  # for each save, the time in forward at which it is freed if recomputed; inf for the end
    needs: tuple[tuple[float, float], ...]  # (needed_at_ms, done_at_ms) of each save; recomputations that read it count
    recomputations: tuple[Recomputation, ...]  # of those at the same time, later ones may read earlier ones' results
    temporaries: tuple[tuple[float, float], ...]  # (at_ms, mib), as in LayerClass
    forward_peak_mib: float
    host_ms: float = 0.0  # the host's time in forward; 0 if unknown
    made_mib: float = 0.0

    @property
    def swapped_mib(self) -> float:
        return sum(mib for _, mib, action in self.saves if action is Action.SWAP)

    @cached_property
    def has_hooks(self) -> bool:
        """Whether the layer swaps or recomputes anything."""
        return any(action is not Action.KEEP for _, _, action in self.saves)

    @cached_property
    def backward_events(self) -> tuple[tuple[float, int, int], ...]:
        """Return ``(at_ms, kind, number)`` of each event in backward, in order. Times are without stalls."""
        # At the same time events come in the order of their kind. 0: save `number` is done. 1: temporaries change to
        # level `number`. 2: save -1 - `number` is needed (`number` below 0), or recomputation `number` runs. 3: save
        # `number` is done at the time of its need.
        events = [(at_ms, 1, i) for i, (at_ms, _) in enumerate(self.temporaries)]
        events += [(recomputation.at_ms, 2, i) for i, recomputation in enumerate(self.recomputations)]
        for i, (needed_ms, done_ms) in enumerate(self.needs):
            events += [(needed_ms, 2, -1 - i), (max(done_ms, needed_ms), 0 if done_ms > needed_ms else 3, i)]
        return tuple(sorted(events))


def scripts(profile: Profile, plan: Plan) -> dict[int, LayerScript]:
    """Return the script of every layer, equal layers the same object, or raise a ``UsageError`` as ``layer_script``."""
    cache: dict[tuple, LayerScript] = {}
    result: dict[int, LayerScript] = {}
    for entry in profile.layers:
        for layer in entry.layers:
            actions, sections = plan.sites(layer), plan.sections(layer)
            key = (entry.layers, tuple(sorted(actions.items(), key=str)), sections)
            if key not in cache:
                cache[key] = layer_script(entry, actions, sections, f"layer {layer}", profile.figures)
            result[layer] = cache[key]
    return result


def layer_script(
    entry: LayerClass, actions: dict[str, Action], sections: tuple[str, ...], where: str = "a layer",
    figures: ModelFigures = UNKNOWN,
) -> LayerScript:  # fmt: skip
    sites = {site.site: site for site in entry.sites}
    known = {section.name: section for section in entry.sections}
    for names, there, what in ((actions, sites, "site"), (sections, known, "section")):
        for name in names:
            if name not in there:
                raise UsageError(f"the plan names the {what} {name!r} in {where}; the profile has {', '.join(there)}.")
    chosen = {name: Action.KEEP if sites[name].is_ineligible else action for name, action in actions.items()}
    units = []
    for name in sections:
        frees = tuple(site for site in known[name].frees if not sites[site].is_ineligible)
        units.append(_section_unit(known[name], frees))
        chosen.update((site, Action.RECOMPUTE) for site in frees)
    of_section = {site for unit in units for site in unit.frees}
    for name, action in chosen.items():
        if action is Action.RECOMPUTE and name not in of_section:
            cost = sites[name].recompute_ms
            if cost is not None:
                units.append(_RecomputeUnit((name,), sites[name].recompute_needs, cost))
                continue
            # As in the engine, a section that frees the site recomputes it, named by the plan or not. Only the section
            # "layer" must be named.
            section = next((one for one in entry.sections if name in one.frees and one.name != LAYER_SECTION), None)
            if section is None:
                raise UsageError(
                    f"the plan recomputes {name} in {where}, which cannot be recomputed alone. Keep or swap it, or "
                    f"name one of the sections {', '.join(known) or '(there are none)'}."
                )
            together = [
                site for site in section.frees
                if chosen.get(site) is Action.RECOMPUTE and sites[site].recompute_ms is None and site not in of_section
            ]  # fmt: skip
            units.append(_section_unit(section, tuple(together)))
            of_section.update(together)
    read = {name for unit in units for name in unit.needs}
    saved = [site for site in entry.sites if site.site in read or not site.is_unsaved]
    needed = {name: site.needed_at_ms for name, site in sites.items()}
    done = {name: site.done_at_ms for name, site in sites.items()}
    units = _in_dependency_order(units, where)
    at_ms: dict[_RecomputeUnit, float] = {}
    for unit in reversed(units):  # consumers first: a unit runs before the first unit that reads its results
        at_ms[unit] = min((needed[site] for site in unit.frees), default=0.0)
        for site in unit.needs:
            needed[site] = min(needed[site], at_ms[unit])
            done[site] = max(done[site], at_ms[unit])
    recomputations = (
        Recomputation(at_ms[unit], unit.cost_ms, sum(sites[site].mib for site in unit.frees), unit.peak_mib)
        for unit in units
    )
    ends = ends_in_forward(saved, figures) if figures.num_parts > 1 else {}
    return LayerScript(
        forward_ms=entry.forward_ms,
        backward_ms=entry.backward_ms,
        saves=tuple((site.saved_at_ms, site.mib, chosen.get(site.site, Action.KEEP)) for site in saved),
        beside=tuple(entry.forward_peak_mib if site.beside_mib is None else site.beside_mib for site in saved),
        gone=tuple(ends.get(site.site, inf if site.gone_at_ms is None else site.gone_at_ms) for site in saved),
        needs=tuple((needed[site.site], done[site.site]) for site in saved),
        recomputations=tuple(recomputations),
        temporaries=entry.temporaries,
        forward_peak_mib=entry.forward_peak_mib,
        host_ms=forward_host_ms(
            entry.host_ms, {site.site: chosen.get(site.site, Action.KEEP) for site in saved}, LAYER_SECTION in sections
        ),
        made_mib=entry.made_mib,
    )


def ends_in_forward(sites: Sequence[SiteProfile], figures: ModelFigures) -> dict[str, float]:
    """Return when sites of a layer are gone in forward, unless autograd holds them.

    Sites of a part of the sequence are gone when the next part begins, and sites of the submodule before when the first
    part begins: then no frame holds them. Other sites may be held until the layer ends.
    """
    # Each part saves the same tensors under the same paths, so their ordinals tell the parts.
    (in_parts, before), num_parts = figures.in_parts, figures.num_parts
    of_path: dict[str, dict[int, SiteProfile]] = {}
    for one in sites:
        path, _, number = one.site.rpartition("/")
        if _is_within(in_parts, path):
            of_path.setdefault(path, {})[int(number)] = one
    part_of: dict[str, int] = {}
    begins: dict[int, float] = {}
    for found in of_path.values():
        per_part = -(-(max(found) + 1) // num_parts)  # rounded up: formulas leave out small tensors
        for ordinal, one in found.items():
            place = ordinal % per_part
            # Otherwise the first part saves it for all parts.
            if all(place + number * per_part in found for number in range(num_parts)):
                part = part_of[one.site] = ordinal // per_part
                begins[part] = min(begins.get(part, one.saved_at_ms), one.saved_at_ms)
    ends = {site: begins[part + 1] for site, part in part_of.items() if part + 1 in begins}
    if begins:
        ends |= {one.site: begins[0] for one in sites if _is_within(before, one.site.rpartition("/")[0])}
    return ends


def _is_within(module: str, path: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _section_unit(section: Section, frees: tuple[str, ...]) -> _RecomputeUnit:
    return _RecomputeUnit(frees, section.needs, section.recompute_ms, section.peak_mib)


def _in_dependency_order(units: list[_RecomputeUnit], where: str) -> list[_RecomputeUnit]:
    """Sort ``units`` so that each runs after the units whose results it reads."""
    producer_of = {site: unit for unit in units for site in unit.frees}
    order: list[_RecomputeUnit] = []

    def add(unit: _RecomputeUnit, ancestors: tuple[_RecomputeUnit, ...]) -> None:
        if unit in ancestors:
            raise UsageError(f"the plan recomputes {', '.join(unit.frees)} in {where}, which needs itself. Keep it.")
        for site in unit.needs:
            if site in producer_of and producer_of[site] is not unit:
                add(producer_of[site], (*ancestors, unit))
        if unit not in order:
            order.append(unit)

    for unit in units:
        add(unit, ())
    return order

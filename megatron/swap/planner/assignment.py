"""What a plan does to each layer of a profile: when storages come and go, and what is run again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.swap.common.plan import LAYER_SECTION, Plan
from megatron.swap.common.types import Action, UsageError
from megatron.swap.planner.profile import LayerClass, Profile, Section


@dataclass(frozen=True)
class Rebuild:
    """Something that runs in backward before ``at_ms``, makes ``mib`` again and meanwhile holds ``peak_mib`` more."""

    at_ms: float
    cost_ms: float
    mib: float
    peak_mib: float = 0.0


@dataclass(frozen=True)
class _Part:
    """What runs again at once: a recipe, or a section."""

    frees: tuple[str, ...]
    needs: tuple[str, ...]
    cost_ms: float
    peak_mib: float = 0.0


@dataclass(frozen=True)
class LayerScript:
    """A layer under a plan.

    Attributes:
        saves: ``(saved_at_ms, mib, action)`` in forward; what is recomputed dies with its forward.
        needs: ``(needed_at_ms, done_at_ms)`` of each save, the needs of recipes included.
        rebuilds: in backward; of those at the same time, the first ones are needed for the others.
    """

    forward_ms: float
    backward_ms: float
    saves: tuple[tuple[float, float, Action], ...]
    needs: tuple[tuple[float, float], ...]
    rebuilds: tuple[Rebuild, ...]
    temporaries: tuple[tuple[float, float], ...]
    forward_peak_mib: float

    @property
    def swapped_mib(self) -> float:
        return sum(mib for _, mib, action in self.saves if action is Action.SWAP)

    @cached_property
    def backward_events(self) -> tuple[tuple[float, int, int], ...]:
        """``(at_ms, kind, number)`` in their order: of those at the same time what is done goes first (0), then the
        level of temporaries changes (1), then recipes run (2), then saves are asked for (2, number below 0: save
        -1 - number) and done (3).

        Offsets are those of the undisturbed layer.
        """
        events = [(at_ms, 1, i) for i, (at_ms, _) in enumerate(self.temporaries)]
        events += [(rebuild.at_ms, 2, i) for i, rebuild in enumerate(self.rebuilds)]
        for i, (needed_ms, done_ms) in enumerate(self.needs):
            events += [(needed_ms, 2, -1 - i), (max(done_ms, needed_ms), 0 if done_ms > needed_ms else 3, i)]
        return tuple(sorted(events))


def scripts(profile: Profile, plan: Plan) -> dict[int, LayerScript]:
    """The script of every layer of the profile; equal layers share one.

    Raises:
        UsageError: the plan names a site or section that the profile has not, or recomputes what has no recipe.
    """
    made: dict[tuple, LayerScript] = {}
    result: dict[int, LayerScript] = {}
    for entry in profile.layers:
        for layer in entry.layers:
            actions, sections = plan.sites(layer), plan.sections(layer)
            key = (entry.layers, tuple(sorted(actions.items(), key=str)), sections)
            if key not in made:
                made[key] = layer_script(entry, actions, sections, f"layer {layer}")
            result[layer] = made[key]
    return result


def layer_script(
    entry: LayerClass, actions: dict[str, Action], sections: tuple[str, ...], where: str = "a layer"
) -> LayerScript:
    """A layer of class ``entry`` whose sites get ``actions`` and whose ``sections`` run again.

    A section of sites that have no recipes of their own runs for those of them that are recomputed, named or not: that
    is how the engine makes such sites again, but for the whole layer.
    """
    sites = {site.site: site for site in entry.sites}
    known = {section.name: section for section in entry.sections}
    for names, there, what in ((actions, sites, "site"), (sections, known, "section")):
        for name in names:
            if name not in there:
                raise UsageError(f"the plan names the {what} {name!r} in {where}; the profile has {', '.join(there)}.")
    chosen = {name: Action.KEEP if sites[name].is_ineligible else action for name, action in actions.items()}
    parts = []
    for name in sections:
        frees = tuple(site for site in known[name].frees if not sites[site].is_ineligible)
        parts.append(_part(known[name], frees))
        chosen.update((site, Action.RECOMPUTE) for site in frees)
    of_section = {site for part in parts for site in part.frees}
    for name, action in chosen.items():
        if action is Action.RECOMPUTE and name not in of_section:
            cost = sites[name].recompute_ms
            if cost is not None:
                parts.append(_Part((name,), sites[name].recompute_needs, cost))
                continue
            section = next((one for one in entry.sections if name in one.frees and one.name != LAYER_SECTION), None)
            if section is None:
                raise UsageError(
                    f"the plan recomputes {name} in {where}, for which there is no recipe. Keep or swap it, or name "
                    f"one of the sections {', '.join(known) or '(there are none)'}."
                )
            together = [
                site for site in section.frees
                if chosen.get(site) is Action.RECOMPUTE and sites[site].recompute_ms is None and site not in of_section
            ]  # fmt: skip
            parts.append(_part(section, tuple(together)))
            of_section.update(together)

    needed = {name: site.needed_at_ms for name, site in sites.items()}
    done = {name: site.done_at_ms for name, site in sites.items()}
    parts = _needs_first(parts, where)
    at_ms: dict[_Part, float] = {}
    for part in reversed(parts):  # by then it is known when those that are made from it run
        at_ms[part] = min((needed[site] for site in part.frees), default=0.0)
        for site in part.needs:
            needed[site] = min(needed[site], at_ms[part])
            done[site] = max(done[site], at_ms[part])
    rebuilds = (
        Rebuild(at_ms[part], part.cost_ms, sum(sites[site].mib for site in part.frees), part.peak_mib)
        for part in parts
    )
    return LayerScript(
        forward_ms=entry.forward_ms,
        backward_ms=entry.backward_ms,
        saves=tuple((site.saved_at_ms, site.mib, chosen.get(site.site, Action.KEEP)) for site in entry.sites),
        needs=tuple((needed[site.site], done[site.site]) for site in entry.sites),
        rebuilds=tuple(rebuilds),
        temporaries=entry.temporaries,
        forward_peak_mib=entry.forward_peak_mib,
    )


def _part(section: Section, frees: tuple[str, ...]) -> _Part:
    return _Part(frees, section.needs, section.recompute_ms, section.peak_mib)


def _needs_first(parts: list[_Part], where: str) -> list[_Part]:
    """In the order in which they can run: what is made again may be needed to make something else again."""
    makers = {site: part for part in parts for site in part.frees}
    order: list[_Part] = []

    def add(part: _Part, on_the_way: tuple[_Part, ...]) -> None:
        if part in on_the_way:
            raise UsageError(f"the plan recomputes {', '.join(part.frees)} in {where}, which needs itself. Keep it.")
        for site in part.needs:
            if site in makers and makers[site] is not part:
                add(makers[site], (*on_the_way, part))
        if part not in order:
            order.append(part)

    for part in parts:
        add(part, ())
    return order

"""What a plan does to each layer of a profile: when storages come and go, and what is run again."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.swap.plan import Plan
from megatron.swap.planner.profile import LayerClass, Profile
from megatron.swap.types import Action, UsageError


@dataclass(frozen=True)
class Rebuild:
    """Something that runs in backward before ``at_ms``, and makes ``mib`` again."""

    at_ms: float
    cost_ms: float
    mib: float


@dataclass(frozen=True)
class LayerScript:
    """A layer under a plan.

    Attributes:
        saves: ``(saved_at_ms, mib, action)`` in forward; what is recomputed dies with its forward.
        needs: ``(needed_at_ms, done_at_ms)`` of each save, the needs of recipes included.
        rebuilds: in backward.
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
    """A layer of class ``entry`` whose sites get ``actions`` and whose ``sections`` run again."""
    sites = {site.site: site for site in entry.sites}
    known = {section.name: section for section in entry.sections}
    for names, there, what in ((actions, sites, "site"), (sections, known, "section")):
        for name in names:
            if name not in there:
                raise UsageError(f"the plan names the {what} {name!r} in {where}; the profile has {', '.join(there)}.")
    chosen = {name: Action.KEEP if sites[name].stays else action for name, action in actions.items()}
    needed = {name: site.needed_at_ms for name, site in sites.items()}
    done = {name: site.done_at_ms for name, site in sites.items()}
    rebuilds = []
    of_section = {site for name in sections for site in known[name].frees}
    reads: list[tuple[float, str]] = []
    for name in sections:
        freed = [sites[site] for site in known[name].frees if not sites[site].stays]
        at_ms = min((site.needed_at_ms for site in freed), default=0.0)
        rebuilds.append(Rebuild(at_ms, known[name].recompute_ms, sum(site.mib for site in freed)))
        reads += [(at_ms, site) for site in known[name].needs]
        chosen.update((site.site, Action.RECOMPUTE) for site in freed)
    for name, action in chosen.items():
        site = sites[name]
        if action is Action.RECOMPUTE and name not in of_section:
            if site.recompute_ms is None:
                raise UsageError(
                    f"the plan recomputes {name} in {where}, for which there is no recipe. Keep or swap it, or name "
                    f"one of the sections {', '.join(known) or '(there are none)'}."
                )
            rebuilds.append(Rebuild(site.needed_at_ms, site.recompute_ms, site.mib))
            reads += [(site.needed_at_ms, need) for need in site.recompute_needs]
    for at_ms, name in reads:
        needed[name] = min(needed[name], at_ms)
    return LayerScript(
        forward_ms=entry.forward_ms,
        backward_ms=entry.backward_ms,
        saves=tuple((site.saved_at_ms, site.mib, chosen.get(site.site, Action.KEEP)) for site in entry.sites),
        needs=tuple((needed[site.site], done[site.site]) for site in entry.sites),
        rebuilds=tuple(rebuilds),
        temporaries=entry.temporaries,
        forward_peak_mib=entry.forward_peak_mib,
    )

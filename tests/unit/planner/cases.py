"""Shared cases of the planner's tests: small and random profiles, and a second implementation of the linear model."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from megatron.swap.common.layer_ranges import format_ranges
from megatron.swap.common.plan import Model, Plan, PlanClass, SitePlan
from megatron.swap.forecast.figures import with_figures
from megatron.swap.planner.profile import (
    MS_PER_MIB,
    Device,
    LayerClass,
    Link,
    NonLayer,
    Pipeline,
    Profile,
    Section,
    SiteProfile,
)

GB_S = MS_PER_MIB * 100
"""Speed of the link: a MiB takes 10 µs, so that 100 MiB take a millisecond."""


def model(num_layers: int = 4, **changes: object) -> Model:
    """A tiny model."""
    sizes = Model(num_layers, 64, 256, 4, 4, 128, 1, 1024, "transformer_engine", "bf16", gated=True)
    return replace(sizes, **changes)


def site(name: str, mib: float, saved: float, needed: float, done: float | None = None, **more: object) -> SiteProfile:
    return SiteProfile(name, mib, saved, needed, needed if done is None else done, **more)  # type: ignore[arg-type]


def profile(
    layers: list[LayerClass],
    *,
    gb_s: float = GB_S,
    micro_batches: int = 1,
    non_layer: NonLayer | None = None,
    pipeline: Pipeline | None = None,
    host_gib: float | None = None,
) -> Profile:
    """Return the profile of a rank without weights, with ``layers``."""
    num_layers = 1 + max(layer for entry in layers for layer in entry.layers)
    return with_figures(Profile(
        source="made up", model=model(num_layers), device=Device("none", 1.0), link=Link(gb_s, gb_s, gb_s, gb_s),
        static_gib=0.0, allocator_gib=0.0, host_gib=host_gib, num_micro_batches=micro_batches,
        non_layer=non_layer or NonLayer(0.0, 0.0, 0.0, 0.0, 0.0), layers=tuple(layers), pipeline=pipeline or Pipeline(),
    ))  # fmt: skip


def plan(of: Profile, classes: dict[tuple[int, ...], dict[str, str]], **sections: tuple[str, ...]) -> Plan:
    """Return a plan with ``classes`` of layers and actions. ``sections`` are given by first layer: ``l3=("mlp",)``."""
    return Plan(of.model, None, None, None, tuple(
        PlanClass(
            format_ranges(layers),
            {name: SitePlan(action) for name, action in sites.items()},  # type: ignore[arg-type]
            sections.get(f"l{layers[0]}", ()),
        )
        for layers, sites in classes.items()
    ))  # fmt: skip


def random_class(source: random.Random, layers: tuple[int, ...], num_sites: int) -> LayerClass:
    """Return equal layers with ordered sites, of which some can be recomputed from others, and sometimes a section.

    Backward takes twice as long as forward, or is so short that reloads stall it.
    """
    forward_ms = source.uniform(0.5, 4.0)
    backward_ms = forward_ms * random.Random(forward_ms).choice([2.0, 2.0, 0.2])
    names = [f"m{i}/0" for i in range(num_sites)]
    saved = sorted(source.uniform(0, forward_ms) for _ in names)
    needed = sorted((source.uniform(0, backward_ms) for _ in names), reverse=True)
    sites = tuple(
        site(name, source.choice([20, 40, 80, 160, 320]), at, need, source.uniform(need, backward_ms),
             recompute_ms=source.choice([None, round(source.uniform(0.05, 1.5), 2)]),
             is_ineligible=source.random() < 0.1)
        for name, at, need in zip(names, saved, needed, strict=True)
    )  # fmt: skip
    # Recomputation reads sites that were saved before, which may be recomputed too.
    sites = tuple(
        replace(one, recompute_needs=tuple(source.sample(names[:i], source.randint(0, i))))
        if one.recompute_ms is not None else one
        for i, one in enumerate(sites)
    )  # fmt: skip
    sections: tuple[Section, ...] = ()
    if source.random() < 0.6:
        freed = tuple(source.sample(names, source.randint(1, num_sites)))
        sections = (Section("part", freed, (), round(source.uniform(0.1, 2.0), 2)),)
    return LayerClass(layers, forward_ms, backward_ms, sites, sections)


def random_profile(seed: int, most_layers: int = 3, most_sites: int = 3) -> Profile:
    """Return one or two classes of layers before a loss, with a link about as fast as the layers."""
    source = random.Random(seed)
    num_layers = source.randint(1, most_layers)
    cut = source.choice([0, 1]) if num_layers > 1 else 0
    parts = [tuple(range(cut)), tuple(range(cut, num_layers))] if cut else [tuple(range(num_layers))]
    return profile(
        [random_class(source, part, source.randint(1, most_sites)) for part in parts],
        gb_s=GB_S * source.uniform(0.3, 3),
        micro_batches=source.randint(1, 3),
        non_layer=NonLayer(
            source.uniform(0, 2), source.uniform(0, 2), source.uniform(0, 5), 0.0, source.uniform(0, 0.3)
        ),
        host_gib=source.choice([None, None, source.uniform(0.05, 1.0)]),
    )


Choice = tuple[tuple[str, ...], dict[str, str]]
"""Sections of a layer, and the action of each site that they do not free."""


def layer_choices(entry: LayerClass, can_swap: bool) -> Iterator[Choice]:
    """Yield every combination of actions for one layer."""
    for sections in ((), *((part.name,) for part in entry.sections)):
        freed = {name for part in entry.sections if part.name in sections for name in part.frees}
        free = [one for one in entry.sites if one.site not in freed]
        allowed = [
            ["keep"] if one.is_ineligible else
            ["keep", *(["swap"] if can_swap else []), *(["recompute"] if one.recompute_ms is not None else [])]
            for one in free
        ]  # fmt: skip
        for actions in itertools.product(*allowed):
            yield sections, dict(zip((one.site for one in free), actions, strict=True))


def all_choices(of: Profile) -> Iterator[dict[int, Choice]]:
    """Yield every plan of a profile whose only chunk ends in the loss, so that its last layer never swaps."""
    (chunk,) = of.chunks
    each = [list(layer_choices(of.of_layer(layer), layer != chunk[-1])) for layer in chunk]
    for choices in itertools.product(*each):
        yield dict(zip(chunk, choices, strict=True))


def linear_cost(of: Profile, choices: dict[int, Choice]) -> tuple[float, float, float]:
    """Return step time (ms), peak and host memory (GiB) of one plan, from the definition of the linear model."""
    recompute = kept = 0.0
    swapped_of = dict.fromkeys(of.layers, 0.0)
    for layer, (sections, actions) in choices.items():
        entry = of.of_layer(layer)
        recompute += sum(part.recompute_ms for part in entry.sections
                         if part.name in sections
                         and any(not one.is_ineligible for one in entry.sites if one.site in part.frees))
        for one in entry.sites:
            action = "keep" if one.is_ineligible else actions.get(one.site, "section")
            kept += one.mib * (action == "keep")
            swapped_of[entry] += one.mib * (action == "swap")
            recompute += (one.recompute_ms or 0.0) * (action == "recompute")
    forward = sum(len(entry.layers) * entry.forward_ms for entry in of.layers)
    backward = sum(len(entry.layers) * entry.backward_ms for entry in of.layers)
    before = {entry: sum(of.of_layer(layer).forward_ms for layer in range(entry.layers[0])) for entry in of.layers}
    begin = {entry: before[entry] + min(one.saved_at_ms for one in entry.sites) for entry in of.layers}
    out_exposed = 0.0
    for start in begin.values():  # later saves have only the rest of forward
        later = sum(mib for entry, mib in swapped_of.items() if begin[entry] >= start)
        out_exposed = max(out_exposed, later * of.out_ms_per_mib - (forward - start))
    swapped = sum(swapped_of.values())
    each = of.non_layer.forward_ms + of.non_layer.backward_ms + forward + backward + recompute
    each += out_exposed
    each += max(0.0, swapped * of.in_ms_per_mib - backward - recompute)
    step = of.num_micro_batches * each + of.non_layer.optimizer_ms
    return step, of.static_gib + kept / 1024 + of.non_layer.peak_gib, swapped / 1024


def to_plan(of: Profile, choices: dict[int, Choice]) -> Plan:
    """Return the plan of ``choices``."""
    classes = {(layer,): actions for layer, (_, actions) in choices.items()}
    return plan(of, classes, **{f"l{layer}": sections for layer, (sections, _) in choices.items()})

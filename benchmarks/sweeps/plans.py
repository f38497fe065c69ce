"""Translate the flags of an unplanned run into a plan, for the planner's memory model."""

from collections.abc import Sequence
from dataclasses import replace

from megatron.swap.common.layer_ranges import format_ranges
from megatron.swap.common.plan import Model, Plan, PlanClass, SitePlan
from megatron.swap.common.settings import parse_layers
from megatron.swap.engine.policy import matches
from megatron.swap.forecast.gpus import find_gpu
from megatron.swap.forecast.shape import kernel_ms, layer_class
from megatron.swap.planner.profile import Profile, Section

RECOMPUTED_SITES = {"norm": ("self_attention.linear_qkv/1", "mlp.linear_fc1/1"), "activation": ("mlp.linear_fc2/0",)}
"""The sites that each value of `--swap-recompute` recomputes."""


H200 = find_gpu("h200")  # The GPU of the measured runs. Site names and memory are the same on every GPU.


def with_mlp_section(profile: Profile) -> Profile:
    """Return the profile with Megatron's MLP recomputation, which also runs fc2 although its output is not needed."""
    times = kernel_ms(profile.model, H200)
    frees = ("mlp.linear_fc1/1", "mlp/0", "mlp.linear_fc2/0")
    mlp = Section("mlp", frees, ("mlp.linear_fc1/0",), times["fc1"] + times["activation"] + times["fc2"])
    return replace(profile, layers=tuple(replace(one, sections=(mlp, *one.sections)) for one in profile.layers))


def plan_of(model: Model, flags: Sequence[str]) -> Plan | None:
    if any(flag.startswith(("--fine-grained", "--cpu-offloading")) for flag in flags):
        return None
    words = list(flags)
    sections: tuple[str, ...] = ()
    if "--recompute-modules" in flags:
        modules = words[words.index("--recompute-modules") + 1 :]
        modules = modules[: next((i for i, word in enumerate(modules) if word.startswith("--")), len(modules))]
        if set(modules) - {"mlp", "layernorm"} or "mlp" not in modules:
            return None  # TransformerEngine's norms are inside its linear layers: "layernorm" changes nothing
        sections = ("mlp",)
    elif "--recompute-granularity" in flags:
        sections = ("layer",)
    names = [one.site for one in layer_class(model, H200, (0,)).sites]
    swapped: frozenset[int] = frozenset()
    if "--swap-layers" in flags:
        swapped = parse_layers(words[words.index("--swap-layers") + 1], model.num_layers)
    module = words[words.index("--swap-modules") + 1] if "--swap-modules" in flags else ""
    chosen = {name: SitePlan("swap") for name in names if not module or matches(module, name.split("/")[0])}
    recomputed = {
        site: SitePlan("recompute") for kind, sites in RECOMPUTED_SITES.items() if kind in flags for site in sites
    }
    others = [layer for layer in range(model.num_layers) if layer not in swapped]
    classes = [PlanClass(format_ranges(swapped), {**chosen, **recomputed}, sections)] if swapped else []
    classes += [PlanClass(format_ranges(others), recomputed, sections)] if others else []
    return Plan(model, None, None, None, tuple(classes))

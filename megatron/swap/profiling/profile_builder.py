"""Builds a profile from a recording."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import count
from statistics import median
from typing import Literal

from megatron.swap.common.plan import LAYER_SECTION, Model
from megatron.swap.common.site_paths import CHECKPOINT_PATH
from megatron.swap.common.types import GIB, MIB, SwapError
from megatron.swap.forecast.figures import figures_of
from megatron.swap.planner.profile import (
    Device,
    LayerClass,
    Link,
    NonLayer,
    NonLayerSite,
    Pipeline,
    Profile,
    Section,
    SiteProfile,
    is_unsaved,
)
from megatron.swap.profiling.recording import NonLayerStorage, Recording, SavedStorage, What
from megatron.swap.profiling.timeline import LayerPass, Moment, NonLayerStep, Timeline

SAME_SIZE = 0.01  # relative difference up to which two sizes count as equal


def build_profile(
    recording: Recording,
    model: Model,
    link: Link,
    device: Device,
    *,
    num_micro_batches: int,
    source: str,
    host_gib: float | None = None,
    pipeline: Pipeline = Pipeline(),  # noqa: B008
    min_mib: float = 0.0,
    whole_layers: bool = False,
) -> Profile:
    """Return the profile of the recorded steps as they would be without swapping and recomputation.

    The engine's own work is removed: waits, copies, recomputations and recompute trials. Sizes and memory are maxima.
    Sites below ``min_mib`` are ineligible. With ``whole_layers`` each layer gets a section ``layer``. Raises
    ``SwapError`` if saved tensors were not recorded: layers had no hooks, or one was recomputed whole.
    """
    timeline = Timeline(recording)
    here = {layer for chunk in pipeline.chunks for layer in chunk}  # without those that save nothing
    whole = [one for one in timeline.passes if one.is_whole and (one.pass_key.layer in here or not pipeline.chunks)]
    passes = [one for one in whole if not one.like]
    like = {one.pass_key.layer: one.like for one in whole if one.like}
    layers = tuple(
        _layer_class(numbers, [one for one in passes if one.pass_key.layer in numbers], timeline, min_mib, whole_layers)
        for numbers in _with_alike(_classes(passes, min_mib), like)
    )
    reserved_bytes = timeline.peak_bytes if recording.reserved_bytes is None else recording.reserved_bytes
    return Profile(
        source=source,
        model=model,
        device=device,
        link=link,
        static_gib=timeline.static_bytes / GIB,
        allocator_gib=max(0, reserved_bytes - timeline.peak_bytes) / GIB,
        host_gib=host_gib,
        num_micro_batches=num_micro_batches,
        non_layer=_non_layer(timeline, layers, num_micro_batches, pipeline, recording.non_layer, min_mib),
        layers=layers,
        pipeline=pipeline,
        # No plan changes the peak of a rank whose layers run no backward, or that has none.
        optimizer_gib=(timeline.between_bytes if layers else timeline.most_bytes) / GIB,
        figures=figures_of(model),
    )


def trained_layers(recording: Recording) -> set[int]:
    """Return the layers that ran backward. A layer whose output nobody uses saves tensors all the same."""
    return {one.pass_key.layer for one in Timeline(recording).passes if one.is_whole}


def with_recorded_times(profile: Profile, recordings: Sequence[Recording], host_factor: float | None = None) -> Profile:
    """Return ``profile`` with the times of other steps of the same sizes, in which layers may be recomputed whole."""
    timelines = [Timeline(recording) for recording in recordings]
    passes = [one for timeline in timelines for one in timeline.passes if one.is_whole]
    costs = [timeline.costs for timeline in timelines]
    layers = []
    for entry in profile.layers:
        mine = [one for one in passes if one.pass_key.layer in entry.layers]
        recompute_ms = [cost for of_site in costs for layer in entry.layers for cost in of_site.get((layer, ""), ())]
        layers.append(_timed(entry, mine, recompute_ms, host_factor) if mine else entry)
    steps = [one for timeline in timelines for one in timeline.steps]
    if not passes or not steps:
        return profile
    forward_ms, backward_ms, optimizer_ms = _non_layer_times(steps, layers, profile.num_micro_batches, profile.pipeline)
    non_layer = replace(profile.non_layer, forward_ms=forward_ms, backward_ms=backward_ms, optimizer_ms=optimizer_ms)
    source = f"{profile.source}, timed in {len(steps)} other step{'s' if len(steps) > 1 else ''}"
    return replace(profile, source=source, layers=tuple(layers), non_layer=non_layer)


def _timed(
    entry: LayerClass, passes: Sequence[LayerPass], recompute_ms: Sequence[float], host_factor: float | None
) -> LayerClass:
    forward_ms = median(one.forward_ms or 0.0 for one in passes)
    backward_ms = median(one.backward_ms or 0.0 for one in passes)
    again_ms = max(0.0, median(recompute_ms)) if recompute_ms else forward_ms
    # Packing, copying and recording saved tensors slow a layer down where the host limits its speed. Layers that are
    # recomputed whole do hardly any of that. So times within a layer are scaled as the layer's own time.
    forward = forward_ms / entry.forward_ms if entry.forward_ms else 1.0
    backward = backward_ms / entry.backward_ms if entry.backward_ms else 1.0
    return replace(
        entry,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        # The least: with a full queue of kernels the host waits for the device.
        # ``host_factor``: the host's time for a layer in a checkpoint, in multiples of the layer's own.
        host_ms=min(one.host_ms for one in passes) / host_factor if host_factor and recompute_ms else 0.0,
        sites=tuple(
            replace(
                site,
                saved_at_ms=site.saved_at_ms * forward,
                gone_at_ms=None if site.gone_at_ms is None else site.gone_at_ms * forward,
                needed_at_ms=site.needed_at_ms * backward,
                done_at_ms=site.done_at_ms * backward,
            )
            for site in entry.sites
        ),
        sections=tuple(
            replace(part, recompute_ms=again_ms) if part.name == LAYER_SECTION else part for part in entry.sections
        ),
        temporaries=tuple((at_ms * backward, mib) for at_ms, mib in entry.temporaries),
    )  # fmt: skip


def _classes(passes: Sequence[LayerPass], min_mib: float) -> list[tuple[int, ...]]:
    of_layer: dict[int, list[LayerPass]] = {}
    for one in passes:
        of_layer.setdefault(one.pass_key.layer, []).append(one)
    classes: list[tuple[list[int], tuple, dict[str, tuple[int, int]]]] = []
    if passes and not any(one.sites for one in passes):
        raise SwapError("the saved tensors of no layer were recorded. Hook all layers while recording.")
    for layer, mine in sorted(of_layer.items()):
        sites = _sites(mine)  # none: another layer saved all of it before (a convolution behind an in-place ReLU)
        inputs = {site for site in sites if site.startswith(f"{CHECKPOINT_PATH}/")}
        if inputs - {need.site for one in mine for storage in one.sites.values() for need in storage.recompute_inputs}:
            raise SwapError(
                f"layer {layer} was recomputed as a whole, so its saved tensors were not recorded: record under a "
                "policy that recomputes single sites."
            )
        sizes = {site: _size_range(mine, site) for site in sites}
        kind = tuple(
            (site, _is_ineligible(mine, site, min_mib), _needs(mine, site), _is_input(mine, site)) for site in sites
        ) + _unsaved_inputs(mine)
        for numbers, other_kind, other_sizes in classes:
            if kind == other_kind and all(_same_size(sizes[site], other_sizes[site]) for site in sites):
                numbers.append(layer)
                break
        else:
            classes.append(([layer], kind, sizes))
    return [tuple(numbers) for numbers, _, _ in classes]


def _with_alike(classes: list[tuple[int, ...]], like: dict[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Add each layer that was not recorded to the class of the last recorded layer that it is ``like``."""
    class_of = {layer: number for number, layers in enumerate(classes) for layer in layers}
    found = [list(layers) for layers in classes]
    for layer, others in like.items():
        known = [class_of[other] for other in others if other in class_of]
        if layer not in class_of and known:
            found[known[-1]].append(layer)
    return [tuple(sorted(layers)) for layers in found]


def _sites(passes: Sequence[LayerPass]) -> list[str]:
    """Return sites in the order of forward. Sites that some passes lack (experts without a token) come last."""
    longest = max(passes, key=lambda one: len(one.sites))
    return list(dict.fromkeys([*longest.sites, *(site for one in passes for site in one.sites)]))


def _size_range(passes: Sequence[LayerPass], site: str) -> tuple[int, int]:
    sizes = [one.sites[site].num_bytes for one in passes if site in one.sites]
    return min(sizes), max(sizes)


def _same_size(one: tuple[int, int], other: tuple[int, int]) -> bool:
    if any(smallest < (1 - SAME_SIZE) * largest for smallest, largest in (one, other)):
        return True  # a size that varies between micro-batches tells nothing about the layer
    return abs(one[1] - other[1]) <= SAME_SIZE * max(one[1], other[1])


def _is_ineligible(passes: Sequence[LayerPass], site: str, min_mib: float) -> bool:
    found = [one.sites[site] for one in passes if site in one.sites]
    is_small = max(storage.num_bytes for storage in found) < min_mib * MIB
    return is_small or any(storage.has_external_refs for storage in found)


def _is_input(passes: Sequence[LayerPass], site: str) -> bool:
    return all(one.sites[site].is_input for one in passes if site in one.sites)


def _needs(passes: Sequence[LayerPass], site: str) -> tuple[str, ...] | None:
    """Return the sites of the same layer that recomputing ``site`` reads, or None.

    None: the site was not recomputed, its inputs differ between passes, or it reads another layer's storage that might
    be gone. Storages of other layers that are held anyway (tables that all layers share) are not returned.
    """
    found = [one.sites[site] for one in passes if site in one.sites]
    foreign = (need for storage in found for need in storage.recompute_inputs if need.pass_key != storage.pass_key)
    if any(storage.producer is None for storage in found) or not all(need.has_external_refs for need in foreign):
        return None
    needs = {
        tuple(need.site for need in storage.recompute_inputs if need.pass_key == storage.pass_key) for storage in found
    }
    return needs.pop() if len(needs) == 1 else None


def _layer_class(
    layers: tuple[int, ...], passes: Sequence[LayerPass], timeline: Timeline, min_mib: float, whole_layers: bool
) -> LayerClass:
    timed = [one for one in passes if not one.has_trials] or passes
    # A median: any step may be slow, above all the first one behind a release of the allocator's cache.
    forward_ms = median(one.forward_ms or 0.0 for one in timed)
    backward_ms = median(one.backward_ms or 0.0 for one in timed)
    sections = _shared_sections(layers, passes, timeline)
    # Recomputing one of these alone also costs the intermediates, which its own measured time does not include.
    shared = {site for one in passes for site, storage in one.sites.items() if _shared(storage)}
    sites = []
    for name in _sites(passes):
        needed_ms = min(_median_moment(timed, (What.ASKED, name), backward_ms), backward_ms)
        done_ms = min(_median_moment(timed, (What.FREED, name), backward_ms), backward_ms)
        needs = None if name in shared else _needs(passes, name)
        cost_ms = _cost_ms(layers, name, timeline)
        sites.append(
            SiteProfile(
                site=name,
                mib=_size_range(passes, name)[1] / MIB,
                saved_at_ms=_median([one.saved_at[name] for one in timed if name in one.saved_at]),
                needed_at_ms=needed_ms,
                done_at_ms=max(needed_ms, done_ms),
                recompute_ms=None if needs is None else cost_ms,
                recompute_needs=needs if needs is not None and cost_ms is not None else (),
                gone_at_ms=_gone_at_ms(timed, name, forward_ms),
                beside_mib=max(one.beside_bytes.get(name, 0) for one in passes) / MIB,
                is_ineligible=_is_ineligible(passes, name, min_mib),
            )
        )
    whole, unsaved = _whole_layer(passes, sites, forward_ms, backward_ms, min_mib) if whole_layers else ((), ())
    return LayerClass(
        layers, forward_ms, backward_ms, (*sites, *unsaved), (*sections, *whole),
        _temporaries(passes, timed, backward_ms), max(one.end_bytes for one in passes) / MIB,
        made_mib=_made_mib(layers, timeline),
    )  # fmt: skip


def _made_mib(layers: Sequence[int], timeline: Timeline) -> float:
    # A mean over the layers counts weights that several of them share once.
    made: defaultdict[int, int] = defaultdict(int)
    for one in timeline.passes:
        if one.is_whole and one.pass_key.layer in layers:
            made[one.pass_key.layer] = max(made[one.pass_key.layer], one.made_bytes)
    return sum(made.values()) / len(made) / MIB


def _gone_at_ms(passes: Sequence[LayerPass], site: str, forward_ms: float) -> float | None:
    """Return when forward frees ``site``, or None where a pass did not free it."""
    saving = [one for one in passes if site in one.sites]
    if not saving or any(site not in one.freed_at for one in saving):
        return None
    return min(forward_ms, median(one.freed_at[site] for one in saving))


def _shared_sections(layers: Sequence[int], passes: Sequence[LayerPass], timeline: Timeline) -> tuple[Section, ...]:
    """Return a section for each group of sites that are recomputed from, or through, the same unsaved storages."""
    shared_of: dict[str, set[str]] = {}
    for one in passes:
        for site, storage in one.sites.items():
            if shared := _shared(storage):
                shared_of.setdefault(site, set()).update(shared)
    # Recomputing one site of a group costs nearly as much as recomputing all.
    groups: list[tuple[set[str], set[str]]] = []
    for site, names in shared_of.items():
        mine, shared = {site}, set(names)
        for other in [group for group in groups if group[1] & shared]:
            groups.remove(other)
            mine |= other[0]
            shared |= other[1]
        groups.append((mine, shared))
    # A site between two sites of a group joins the group: it cannot run before or after all of them.
    needs_of = {site: _needs(passes, site) for site in _sites(passes)}
    groups = _without_cycles(groups, {site: needs for site, needs in needs_of.items() if needs})
    sections = []
    for sites, shared in groups:
        needs = [needs_of[site] for site in sites]
        costs = [_cost_ms(layers, name, timeline) for name in (*sites, *shared) if not is_unsaved(name)]
        if None not in needs and None not in costs:
            frees = tuple(site for site in _sites(passes) if site in sites)
            read_sites = dict.fromkeys(need for of_site in needs for need in of_site or () if need not in sites)
            cost_ms = sum(cost or 0.0 for cost in costs)
            intermediates_mib = max(one.intermediate_bytes for one in passes) / MIB
            sections.append(Section(f"behind {frees[0]}", frees, tuple(read_sites), cost_ms, intermediates_mib))
    return tuple(sections)


def _without_cycles(
    groups: list[tuple[set[str], set[str]]], needs_of: dict[str, tuple[str, ...]]
) -> list[tuple[set[str], set[str]]]:
    """Return ``groups`` of sites and shared storages, joined where sites read each other."""
    while True:
        in_groups = {site for sites, _ in groups for site in sites}
        nodes = [*groups, *(({site}, set()) for site in needs_of if site not in in_groups)]
        node_of = {site: number for number, (sites, _) in enumerate(nodes) for site in sites}
        reads = {
            number: {node_of[need] for site in sites for need in needs_of.get(site, ()) if need in node_of} - {number}
            for number, (sites, _) in enumerate(nodes)
        }
        try:
            TopologicalSorter(reads).prepare()
        except CycleError as error:
            cycle = set(error.args[1])
            joined = [set().union(*parts) for parts in zip(*(nodes[number] for number in cycle), strict=True)]
            groups = [group for number, group in enumerate(groups) if number not in cycle]
            groups.append((joined[0], joined[1]))
        else:
            return groups


def _shared(storage: SavedStorage) -> set[str]:
    """Return the names of unsaved storages that recomputing ``storage`` reads, or passes through."""
    read = {need.site for need in storage.recompute_inputs if need.pass_key == storage.pass_key}
    return {*storage.intermediates, *filter(is_unsaved, read)}


def _cost_ms(layers: Sequence[int], name: str, timeline: Timeline) -> float | None:
    """Return the time to recompute a storage once its inputs are there, or None if it was not recomputed."""
    costs = [cost for layer in layers for cost in timeline.costs.get((layer, name), ())]
    return max(0.0, median(costs)) if costs else None


def _median_moment(passes: Iterable[LayerPass], moment: Moment, otherwise: float) -> float:
    return median([one.moments[moment] for one in passes if moment in one.moments] or [otherwise])


def _temporaries(
    passes: Sequence[LayerPass], timed: Sequence[LayerPass], backward_ms: float
) -> tuple[tuple[float, float], ...]:
    """Return the largest temporaries at each moment of backward at which the level changes."""
    moments = dict.fromkeys(moment for one in passes for moment in one.moments)
    at_ms = {moment: min(_median_moment(timed, moment, backward_ms), backward_ms) for moment in moments}
    levels: list[tuple[float, float]] = []
    for moment in sorted(moments, key=lambda moment: at_ms[moment]):
        mib = max(one.temporaries.get(moment, 0) for one in passes) / MIB
        if mib != (levels[-1][1] if levels else 0.0):
            levels.append((at_ms[moment], mib))
    return tuple(levels)


def _unsaved_inputs(passes: Sequence[LayerPass]) -> tuple[int, bool]:
    """Return the bytes of inputs that the layer does not save, and whether others hold some of them."""
    found = [one.unsaved_inputs for one in passes if one.unsaved_inputs is not None]
    return max((one.num_bytes for one in found), default=0), any(one.has_external_refs for one in found)


def _whole_layer(
    passes: Sequence[LayerPass], sites: Sequence[SiteProfile], forward_ms: float, backward_ms: float, min_mib: float
) -> tuple[tuple[Section, ...], tuple[SiteProfile, ...]]:
    """Return the section ``layer``, and sites of inputs that the layer does not save. None: nothing would be freed."""
    inputs = tuple(site.site for site in sites if _is_input(passes, site.site))
    frees = tuple(site.site for site in sites if site.site not in inputs and not site.is_unsaved)
    num_bytes, is_held = _unsaved_inputs(passes)
    unsaved: tuple[SiteProfile, ...] = ()
    if num_bytes:
        is_ineligible = is_held or num_bytes < min_mib * MIB
        names = (f"{CHECKPOINT_PATH}/{number}" for number in count())  # operators may be recomputed from other inputs
        free, mib = next(name for name in names if all(name != site.site for site in sites)), num_bytes / MIB
        unsaved = (SiteProfile(free, mib, 0.0, 0.0, backward_ms, is_ineligible=is_ineligible),)
    if not frees or not (inputs or unsaved):
        return (), ()
    # Temporaries of backward include tensors saved outside the layers already.
    peak_mib = max(max(0, one.forward_peak_bytes - one.non_layer_bytes) for one in passes) / MIB
    needs = (*(site.site for site in unsaved), *inputs)
    return (Section(LAYER_SECTION, frees, needs, forward_ms, peak_mib),), unsaved


def _non_layer(
    timeline: Timeline, layers: Sequence[LayerClass], num_micro_batches: int, pipeline: Pipeline,
    saved: Sequence[NonLayerStorage], min_mib: float,
) -> NonLayer:  # fmt: skip
    """Return the figures outside layers of the chunk that ends in the loss; without the loss, of the first chunk."""
    steps = [one for one in timeline.steps if not one.has_trials] or timeline.steps
    has_loss = _has_loss(pipeline)
    chunk = _chunk(steps, pipeline)
    forward_ms, backward_ms, optimizer_ms = _non_layer_times(steps, layers, num_micro_batches, pipeline)
    # Without the loss, storages of other micro-batches are still held when a chunk's forward begins: subtract them.
    kept_bytes = [
        end if has_loss else max(0, end - begin)
        for one in timeline.steps for begin, end in one.kept_bytes.get(chunk, ())
    ]
    loss_bytes = [peak for one in timeline.steps for peak in one.loss_peak_bytes] if has_loss else []
    return NonLayer(
        forward_ms=forward_ms, backward_ms=backward_ms, optimizer_ms=optimizer_ms,
        kept_gib=max(kept_bytes, default=0) / GIB, peak_gib=max(loss_bytes, default=0) / GIB,
        sites=_non_layer_sites([one for one in saved if one.chunk == chunk], min_mib),
    )  # fmt: skip


def _has_loss(pipeline: Pipeline) -> bool:
    return pipeline.rank == pipeline.size - 1


def _chunk(steps: Sequence[NonLayerStep], pipeline: Pipeline) -> int:
    """Return the number of the chunk that ends in the loss, or 0 on a rank without loss."""
    return max((chunk for one in steps for chunk in one.forward_ms), default=0) if _has_loss(pipeline) else 0


def _non_layer_times(
    steps: Sequence[NonLayerStep], layers: Sequence[LayerClass], num_micro_batches: int, pipeline: Pipeline
) -> tuple[float, float, float]:
    has_loss, chunk = _has_loss(pipeline), _chunk(steps, pipeline)
    layer_ms = sum(len(entry.layers) * (entry.forward_ms + entry.backward_ms) for entry in layers)
    forward_ms = backward_ms = 0.0
    if has_loss or pipeline.rank == 0:
        forward_ms = _median([ms for one in steps for ms in one.forward_ms.get(chunk, ())])
    if has_loss:
        backward_ms = _median([ms for one in steps for ms in one.loss_ms])
    if pipeline.size == 1:
        backward_ms += _median([ms for one in steps for ms in one.between_ms])
        # Without a pipeline the optimizer's time is the rest of the step.
        rest_ms = _median([one.step_ms for one in steps])
        rest_ms -= num_micro_batches * (forward_ms + backward_ms + layer_ms)
    else:
        # In a pipeline the last backward is followed by a wait for the stages before this one.
        waited_ms = pipeline.rank * sum(len(entry.layers) * entry.backward_ms for entry in layers)
        rest_ms = _median([one.after_ms for one in steps]) - waited_ms / max(1, len(pipeline.chunks))
    return max(0.0, forward_ms), max(0.0, backward_ms), max(0.0, rest_ms)


def _non_layer_sites(saved: Sequence[NonLayerStorage], min_mib: float) -> tuple[NonLayerSite, ...]:
    """Return each site with its largest size and shortest idle time."""
    found: dict[str, list[NonLayerStorage]] = {}
    for one in saved:
        if one.at_ms.keys() & {What.ASKED, What.FREED}:
            found.setdefault(one.site, []).append(one)
    sites = []
    for name, ones in found.items():
        mib = max(one.num_bytes for one in ones) / MIB
        # A storage that backward never uses is idle until it is freed. The engine's own work is included.
        idle_ms = min(one.at_ms.get(What.ASKED, one.at_ms.get(What.FREED, 0.0)) - one.at_ms[What.SAVED] for one in ones)
        held: Literal["held"] | None = "held" if any(one.has_external_refs for one in ones) else None
        sites.append(NonLayerSite(name, mib, max(0.0, idle_ms), "small" if mib < min_mib else held))
    return tuple(sites)


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0

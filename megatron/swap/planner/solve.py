"""Finds the fastest plan within a memory budget: the program proposes plans, and ``simulate`` evaluates them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from math import ceil
from typing import Literal

from megatron.swap.common.layer_ranges import format_ranges
from megatron.swap.common.plan import LAYER_SECTION, Infeasible, Plan, PlanClass, Predicted, SitePlan
from megatron.swap.common.types import Action
from megatron.swap.planner.host_time import forward_host_ms
from megatron.swap.planner.profile import LayerClass, Profile, Section, sha256
from megatron.swap.planner.program import (
    Block,
    Counts,
    Program,
    Windows,
    bound_windows,
    search_windows,
    step_factor,
)
from megatron.swap.planner.simulate import MIB_PER_GIB, Prediction, simulate

MAX_ROUNDS = 7  # corrections of the program by the simulator
BUSY_HOST = 1.5  # times that a busy host takes, of the fastest steps' time: the median of the steps timed on an H200
SEVERAL = 4  # plans to look at for each wanted plan: some differ in their prefetch window alone
SAME = 1.001  # step times that differ by less are the same
MAX_TIGHTENINGS = 3  # times that a workload gets a smaller budget because peaks exceeded the real budget
MAX_WIDENINGS = 3  # further plans for memory that plans left free
WIDENED_GAIN = 0.001  # a run tries a further plan if it is predicted to be faster by this fraction
NEAR_OPTIMUM = 1e-4  # relative gap of programs that are corrected afterwards: the simulator differs by more
SMALLEST_MARGIN = 1.002  # on the smallest feasible budget in messages: two runs do not measure the same to the byte
Order = Literal["recompute last", "recompute first", "spread"]  # how layers are chosen for the counts of a program
NEAR_MS = 0.05
NEAR_GIB = 1e-9
TIGHTER_GIB = 1e-4


@dataclass(frozen=True)
class Pass:
    # Fraction of the program's windows. Smaller windows make the program swap less. Prefetched tensors take memory too,
    # so less swapping may fit where more does not.
    window: float
    # Prefetch windows to try, in largest layers; empty for the engine's own. At most twice a chosen window is
    # prefetched. That helps if memory is short in backward, and hurts if the link is busy there. A pipeline skips such
    # passes, since its next backward may be of another chunk.
    prefetch: tuple[float, ...]
    near: float  # the search stops behind the pass if the step time is at most this multiple of the lower bound
    # Correct the program where the device waits longer for the host than the program assumes: it lets the host make up
    # in late layers for delays in early layers. Skipped if the host's time does not count.
    corrects_host: bool = False


PASSES = (
    Pass(1.0, (), 1.001),
    Pass(1.0, (), 1.001, corrects_host=True),
    Pass(1.0, (1.0, 0.5), 1.02),  # the passes from here on hardly improve on each other
    Pass(1.0, (0.25,), 1.02),
    Pass(0.3, (), 1.02),
    Pass(0.0, (), 1.02),
)


@dataclass(frozen=True)
class Solution:
    """Plans that fit, the fastest first, each with its prediction."""

    plans: tuple[Plan, ...]
    predictions: tuple[Prediction, ...]
    lower_bound_ms: float  # in this model no plan has a shorter step within the budget, less the reserve

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    @property
    def prediction(self) -> Prediction:
        return self.predictions[0]


# Groups of layers with equal plans: layer numbers, class, action of each site, sections.
Assignment = tuple[tuple[tuple[int, ...], LayerClass, tuple[tuple[str, str], ...], tuple[str, ...]], ...]


def solve(profile: Profile, budget_gib: float, max_plans: int = 3, reserve_gib: float | None = None) -> Solution:
    """Plan ``profile`` within ``budget_gib``, less the largest reserve for fragmentation with which a plan fits.

    Training may have shown the reserve, ``reserve_gib``; it is below 0 if a plan held less than predicted. Raises
    ``Infeasible`` with the smallest feasible budget, and changes that lower it.
    """
    search = _Search(profile)
    reserves_gib = profile.reserves_gib if reserve_gib is None else (reserve_gib,)
    if search.kept().peak_gib <= budget_gib - reserves_gib[-1]:
        reserves_gib = reserves_gib[-1:]
    for room_gib in dict.fromkeys(budget_gib - each for each in reserves_gib):
        bound = search.run(room_gib)
        fitting = search.fitting(room_gib)
        if fitting:
            break
    else:
        raise _infeasible(profile, budget_gib)
    if search.waits:
        fitting = _for_any_host(profile, room_gib, fitting[: SEVERAL * max_plans])
    bound = min(bound, *(prediction.step_ms for _, prediction in fitting))
    name = sha256(profile)
    best: list[tuple[Plan, Prediction]] = []
    for plan, prediction in fitting:
        # Plans that differ only in their prefetch window count once.
        if len(best) < max_plans and all(plan.classes != other.classes for other, _ in best):
            best.append((plan, prediction))
    plans = tuple(
        replace(plan, budget_gib=budget_gib, profile_sha256=name, predicted=_predicted(prediction, bound))
        for plan, prediction in best
    )
    return Solution(plans, tuple(prediction for _, prediction in best), bound)


def _for_any_host(
    profile: Profile, budget_gib: float, fitting: Sequence[tuple[Plan, Prediction]]
) -> list[tuple[Plan, Prediction]]:
    """Return plans by their step time where the host is busy in half of the steps, the shortest first."""
    # A profile has the least time of the host. Plans for that time alone make most steps wait, so plans for a busy host
    # are added if the best plan would wait for such a host.
    busy = replace(profile, layers=tuple(replace(one, host_ms=BUSY_HOST * one.host_ms) for one in profile.layers))
    plan, prediction = fitting[0]
    if simulate(busy, plan).step_ms > SAME * prediction.step_ms:
        search = _Search(busy)
        search.run(budget_gib, PASSES[:2])
        found = search.fitting(budget_gib)[: len(fitting)]
        fitting = [*fitting, *((plan, simulate(profile, plan)) for plan, _ in found)]
    return sorted(fitting, key=lambda pair: pair[1].step_ms + simulate(busy, pair[0]).step_ms)


def curve(profile: Profile, num_points: int = 24) -> list[Solution]:
    """Return the fastest plans for ``num_points`` budgets, from the smallest feasible budget to keeping everything."""
    smallest = smallest_budget(profile)
    most = simulate(profile, empty_plan(profile)).peak_gib + profile.reserves_gib[-1]
    points: list[Solution] = []
    for i in range(num_points):
        budget_gib = smallest + (most - smallest) * i / (num_points - 1) + TIGHTER_GIB
        point = solve(profile, budget_gib, 1)
        # A plan that fits a smaller budget fits this one, so more memory is never slower.
        if points and points[-1].prediction.step_ms < point.prediction.step_ms:
            cheaper = points[-1]
            bound = min(point.lower_bound_ms, cheaper.prediction.step_ms)
            plan = replace(cheaper.plan, budget_gib=budget_gib, predicted=_predicted(cheaper.prediction, bound))
            point = Solution((plan,), cheaper.predictions, bound)
        points.append(point)
    return points


def smallest_budget(profile: Profile) -> float:
    search = _Search(profile)
    search.simulate_smallest()
    least_gib = min(prediction.peak_gib for _, prediction in search.fitting(float("inf")))
    return least_gib + profile.reserves_gib[-1]


def _predicted(prediction: Prediction, bound_ms: float) -> Predicted:
    return Predicted(prediction.peak_gib, prediction.step_ms, bound_ms, prediction.host_gib)


def empty_plan(profile: Profile) -> Plan:
    """Return the plan that keeps everything."""
    return Plan(profile.model, None, None, None, ())


def whole_layers(profile: Profile, budget_gib: float) -> Plan | None:
    """Return the plan that swaps layer inputs and recomputes all layers; ``None`` if it may exceed ``budget_gib``."""
    blocks = Program(profile).blocks
    plan = _to_plan(profile, _arrange(blocks, _recompute_most(blocks, swap_inputs=True), "recompute last"))
    return plan if simulate(profile, plan).peak_gib <= budget_gib - profile.reserve_gib else None


class _Search:
    """The simulated plans of one profile. Each plan is simulated once."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._program = Program(profile)
        self._found: dict[tuple[Assignment, float | None], tuple[Plan, Prediction]] = {}
        self._nothing = [Counts({}, {}, {}) for _ in self._program.blocks]
        # Whether the device may wait for the host.
        self.waits = profile.pipeline.size == 1 and any(entry.host_ms for entry in profile.layers)
        self._orders: tuple[Order, ...] = ("recompute last", "recompute first", *(("spread",) if self.waits else ()))

    def fitting(self, budget_gib: float) -> list[tuple[Plan, Prediction]]:
        """Return the plans within the budgets by step time; of equally fast ones by host memory, then by peak."""
        host_gib = self._profile.host_gib
        fitting = [
            pair for pair in self._found.values()
            if pair[1].peak_gib <= budget_gib and (host_gib is None or pair[1].host_gib <= host_gib + NEAR_GIB)
        ]  # fmt: skip
        return sorted(fitting, key=lambda pair: (round(pair[1].step_ms, 3), pair[1].host_gib, pair[1].peak_gib))

    def kept(self) -> Prediction:
        (kept,) = self._simulate(self._nothing, ("recompute last",))
        return kept

    def run(self, budget_gib: float, passes: Sequence[Pass] = PASSES) -> float:
        """Simulate plans for ``budget_gib``. Return the lower bound in ms; infinite if nothing can fit."""
        profile, kept = self._profile, self.kept()
        if kept.peak_gib <= budget_gib or not self._program.blocks:  # without layers there is no other plan
            return kept.step_ms
        first = self._program.solve(budget_gib, profile.host_gib, bound_windows(profile))
        if first is None:
            self.simulate_smallest()  # the program counts bytes that the simulator does not
            return float("inf")
        windows = search_windows(profile)
        for one in passes:
            is_skipped = (one.prefetch and profile.pipeline.size > 1) or (one.corrects_host and not self.waits)
            if not is_skipped:
                self._refine(budget_gib, Windows(windows.out_ms * one.window, windows.in_ms * one.window), one)
            fitting = self.fitting(budget_gib)
            if fitting and fitting[0][1].step_ms <= one.near * first.bound_ms:
                break
        else:
            self.simulate_smallest()
        return first.bound_ms

    def _refine(self, budget_gib: float, windows: Windows, of_pass: Pass) -> None:
        """Repeat: solve the program, simulate its plan, and correct the program where it was too optimistic.

        A plan over a memory budget shrinks the program's budget. Copies that stall longer than assumed narrow its
        windows by the difference. A longer wait for the host makes the host earlier by the difference. The plan changes
        with each correction, so a correction may be too much. Then all three are bisected.
        """
        profile, room_gib, host_gib = self._profile, budget_gib, self._profile.host_gib
        tighter_gib = TIGHTER_GIB
        too_wide: Windows | None = None
        wide_enough: Windows | None = None
        for _ in range(MAX_ROUNDS):
            answer = self._program.solve(room_gib, host_gib, windows, gap=NEAR_OPTIMUM)
            if answer is None:
                return
            predictions = self._simulate(answer.counts, window_fractions=of_pass.prefetch)
            least = min(predictions, key=lambda prediction: prediction.peak_gib)
            over_gib = least.peak_gib - budget_gib
            host_over_gib = least.host_gib - profile.host_gib if profile.host_gib is not None else 0.0
            if over_gib > 0 or host_over_gib > NEAR_GIB:
                # The excess may be missing from the program (backward's gradients), so the steps grow.
                room_gib -= max(0.0, over_gib) + tighter_gib
                tighter_gib *= 8
                host_gib = None if host_gib is None else host_gib - max(0.0, host_over_gib)
                continue
            factor = step_factor(profile)
            best = min(predictions, key=lambda prediction: prediction.step_ms)
            out_more = best.out_stall_ms / factor - answer.out_exposed_ms
            in_more = best.in_stall_ms / factor - answer.in_exposed_ms
            host_more = best.host_wait_ms - max(0.0, answer.host_exposed_ms) if of_pass.corrects_host else 0.0
            if max(out_more, in_more, host_more) < NEAR_MS:
                wide_enough = windows
            else:
                too_wide = windows
            if too_wide is None:
                return
            if wide_enough is None:
                # The host's lead must go first.
                early_ms = host_more - min(0.0, answer.host_exposed_ms) if host_more >= NEAR_MS else 0.0
                windows = Windows(
                    windows.out_ms - max(0.0, out_more), windows.in_ms - max(0.0, in_more),
                    windows.host_early_ms + early_ms,
                )  # fmt: skip
            else:
                windows = Windows(
                    (too_wide.out_ms + wide_enough.out_ms) / 2, (too_wide.in_ms + wide_enough.in_ms) / 2,
                    (too_wide.host_early_ms + wide_enough.host_early_ms) / 2,
                )  # fmt: skip

    def simulate_smallest(self) -> None:
        """Simulate the plans that are expected to need the least memory."""
        blocks = self._program.blocks
        answer = self._program.solve(None, self._profile.host_gib, search_windows(self._profile), minimize_memory=True)
        found = answer.counts if answer else self._nothing
        for counts in (self._nothing, found, _recompute_most(blocks), _recompute_most(blocks, swap_inputs=True)):
            self._simulate(counts)
            if self._profile.pipeline.size == 1:
                self._simulate(counts, window_fractions=(1.0,))

    def _simulate(
        self, counts: Sequence[Counts], orders: tuple[Order, ...] | None = None,
        window_fractions: tuple[float, ...] = (),
    ) -> list[Prediction]:  # fmt: skip
        predictions = []
        for order in orders or self._orders:
            assignment = _arrange(self._program.blocks, counts, order)
            for fraction in window_fractions or (None,):
                if (assignment, fraction) not in self._found:
                    plan = _to_plan(self._profile, assignment)
                    if fraction is not None:
                        plan = replace(plan, prefetch_gib=_window_gib(plan, fraction))
                    self._found[assignment, fraction] = plan, simulate(self._profile, plan)
                predictions.append(self._found[assignment, fraction][1])
        return predictions


def _arrange(blocks: Sequence[Block], answer: Sequence[Counts], order: Order) -> Assignment:
    """Choose layers for the counts: the earliest layers swap; the last, or the first free layers, recompute.

    With ``spread`` the last layers recompute, and each site is swapped in the earliest layers without a wait for the
    host.
    """
    of_layer: dict[int, tuple[LayerClass, dict[str, str], list[str]]] = {}
    for block, counts in zip(blocks, answer, strict=True):
        for layer in block.layers:
            of_layer[layer] = block.entry, {}, []
        inputs = {site.site for site in block.entry.sites if site.is_unsaved}
        saved = {site: count for site, count in counts.swapped.items() if site not in inputs}
        if order != "spread":
            for site, count in saved.items():
                for layer in block.layers[:count]:
                    of_layer[layer][1][site] = "swap"
        layers = block.layers if order == "recompute first" else block.layers[::-1]
        for part in sorted(block.sections, key=lambda part: -len(part.frees)):
            freed = [site.site for site in block.freed(part)]
            free = [layer for layer in layers if not of_layer[layer][1].keys() & set(freed)]
            for layer in free[: counts.sections.get(part.name, 0)]:
                of_layer[layer][1].update((site, f"section {part.name}") for site in freed)
                of_layer[layer][2].append(part.name)
        for site in inputs:
            reading = {part.name for part in block.sections if site in part.needs}
            read = [layer for layer in block.layers if reading & set(of_layer[layer][2])]
            for layer in read[: counts.swapped.get(site, 0)]:
                of_layer[layer][1][site] = "swap"
        for site, count in counts.recomputed.items():
            free = [layer for layer in layers if site not in of_layer[layer][1]]
            for layer in free[:count]:
                of_layer[layer][1][site] = "recompute"
        if order == "spread":
            _spread(saved, {layer: of_layer[layer] for layer in block.layers[: block.num_swappable]})
    alike: dict[tuple, list[int]] = {}
    for layer, (entry, actions, sections) in sorted(of_layer.items()):
        alike.setdefault((entry, tuple(sorted(actions.items())), tuple(sections)), []).append(layer)
    return tuple((tuple(layers), *key) for key, layers in alike.items())


def _spread(swapped: Mapping[str, int], of_layer: Mapping[int, tuple[LayerClass, dict[str, str], list[str]]]) -> None:
    """Swap each site in ``swapped[site]`` of the layers, which may swap: those with the shortest wait for the host."""

    def wait_ms(layer: int, more: str) -> float:
        entry, chosen, sections = of_layer[layer]
        actions = {name: Action.SWAP if how == "swap" else Action.RECOMPUTE for name, how in chosen.items()}
        host_ms = forward_host_ms(entry.host_ms, {**actions, more: Action.SWAP}, LAYER_SECTION in sections)
        return max(0.0, host_ms - entry.forward_ms)

    for site, count in sorted(swapped.items(), key=lambda pair: -pair[1]):
        free = [layer for layer, (_, chosen, _) in of_layer.items() if site not in chosen]
        for layer in sorted(free, key=lambda layer: (wait_ms(layer, site), layer))[:count]:
            of_layer[layer][1][site] = "swap"


def _to_plan(profile: Profile, assignment: Assignment) -> Plan:
    classes = []
    for layers, entry, chosen, sections in assignment:
        actions = dict(chosen)
        read = {need for part in entry.sections if part.name in sections for need in part.needs}
        sites = {}
        for site in entry.sites:
            if site.is_unsaved and site.site not in read:
                continue
            action = actions.get(site.site, "keep")
            why = "not eligible" if site.is_ineligible else "there is room"
            if action == "swap":
                why = f"{site.mib * profile.out_ms_per_mib:.2f} ms on the link"
            elif action == "recompute":
                why = f"{site.recompute_ms:.2f} ms to recompute"
            elif action.startswith("section"):
                cost = next(part.recompute_ms for part in entry.sections if action == f"section {part.name}")
                action, why = "recompute", f"{action}: {cost:.2f} ms for all of it"
            sites[site.site] = SitePlan(action, round(site.mib, 6), why)  # type: ignore[arg-type]
        named = tuple(
            part.name for part in entry.sections if part.name in sections and not _is_implied_by_sites(entry, part)
        )
        classes.append(PlanClass(format_ranges(layers), sites, named))
    return Plan(profile.model, None, None, None, tuple(classes))


def _window_gib(plan: Plan, fraction: float) -> float | None:
    """Return ``fraction`` of the largest layer's swapped GiB; ``None`` if no layer swaps."""
    swapped = [sum(site.mib or 0.0 for site in entry.sites.values() if site.action == "swap") for entry in plan.classes]
    # Rounded up, so that a window of one largest layer holds that layer.
    return ceil(fraction * max(swapped, default=0.0) / MIB_PER_GIB * 1e6) / 1e6 or None


def _is_implied_by_sites(entry: LayerClass, part: Section) -> bool:
    """Whether recomputing the sites of ``part`` implies ``part``, so that plans need not name it (``layer_script``)."""
    frees = [site for site in entry.sites if site.site in part.frees and not site.is_ineligible]
    return part.name != LAYER_SECTION and all(site.recompute_ms is None for site in frees)


def _recompute_most(blocks: Sequence[Block], swap_inputs: bool = False) -> list[Counts]:
    """Return counts in which every layer recomputes its largest section, and keeps or swaps the section's inputs."""
    # Swapped inputs take a prefetch window at the loss, so kept inputs may need less memory.
    most = []
    for block in blocks:
        widest = max(block.sections, key=lambda part: sum(site.mib for site in block.freed(part)), default=None)
        needs = widest.needs if widest else ()
        inputs = [site.site for site in block.entry.sites if site.site in needs and not site.is_ineligible]
        swapped = dict.fromkeys(inputs, block.num_swappable) if swap_inputs else {}
        most.append(Counts({widest.name: len(block.layers)} if widest else {}, {}, swapped))
    return most


def _infeasible(profile: Profile, budget_gib: float) -> Infeasible:
    smallest = smallest_budget(profile)
    written = written_budget(smallest)
    hints = ["a smaller --micro-batch-size" if profile.model.micro_batch_size > 1 else "a shorter --seq-length",
             "more tensor or context parallelism"]  # fmt: skip
    if profile.host_gib is not None:
        unlimited = smallest_budget(replace(profile, host_gib=None))
        if unlimited < smallest - 0.01:
            more = f"more host memory (now {profile.host_gib:g} GiB; with enough, {unlimited:.2f} GiB are feasible)"
            hints.insert(0, more)
    if profile.static_gib > 0.5 * smallest:
        offload = "more pipeline stages" if profile.offloaded_state else "--swap-optimizer auto, more pipeline stages"
        hints.append(f"fewer bytes of weights and optimizer ({profile.static_gib:.2f} GiB): {offload}")
    return Infeasible(
        f"no plan stays below {budget_gib:.10g} GiB: the smallest budget that was found feasible is {written} GiB. "
        f"Give at least that, or lower it by {'; '.join(hints)}.",
        float(written),
        0.0 if profile.allocator_gib is None else profile.fragments_gib + profile.reserves_gib[-1],
    )


def written_budget(smallest_gib: float) -> str:
    """Format the smallest feasible budget for a user who gives it to the next run: plain decimals, rounded up."""
    digits = Context(prec=4, rounding=ROUND_CEILING)
    return format(digits.create_decimal_from_float(SMALLEST_MARGIN * smallest_gib), "f")

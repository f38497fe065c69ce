"""The mixed-integer program behind a plan: how many layers of each block swap or recompute each site.

The unknowns are counts of layers, so 96 layers cost no more than 16. The time model is linear: recomputation, plus
copies beyond the window in which they overlap with compute. With the windows of ``bound_windows`` no plan that
``simulate`` times is faster than the program's optimum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from megatron.swap.common.plan import LAYER_SECTION
from megatron.swap.planner.host_time import HOOKS, RECOMPUTED_SITE, SWAPPED_SITE, WATCH, WHOLE
from megatron.swap.planner.profile import LayerClass, Profile, Section, SiteProfile
from megatron.swap.planner.schedule import schedule
from megatron.swap.planner.solver_output import without_solver_lines

MIB_PER_GIB = 1024.0
UNIT = 1000.0  # scales the objective from ms to µs: the solver's tolerances are absolute
# Tie-breaks. Of equally fast plans prefer fewer copies in earlier layers (ms per MiB), and fewer layers that swap (ms
# per layer).
SWAPPED_MIB_COST = 1e-7
TOUCHED_LAYER_COST = 1e-5
NUM_TIMES = 3  # columns for exposed times, behind those of the blocks; another column is for the peak
PROVEN = 1e-7  # relative gap below which an answer counts as optimal
MAX_NODES = 300  # of branch and bound; a search that stops there has a looser lower bound


@dataclass(frozen=True)
class Block:
    """Equal layers of one chunk, earliest first."""

    entry: LayerClass
    layers: tuple[int, ...]
    chunk: int
    num_swappable: int  # all but the layer before the loss

    @property
    def sections(self) -> list[Section]:
        return [part for part in self.entry.sections if self.freed(part)]

    def freed(self, section: Section) -> list[SiteProfile]:
        """Return the sites that ``section`` frees, without ineligible sites."""
        return [site for site in self.entry.sites if site.site in section.frees and not site.is_ineligible]

    def freed_mib(self, section: Section) -> float:
        """Return the MiB that ``section`` frees, less those of inputs that are saved for it alone."""
        added = (site.mib for site in self.entry.sites if site.is_unsaved and site.site in section.needs)
        return sum(site.mib for site in self.freed(section)) - sum(added)


def blocks(profile: Profile) -> list[Block]:
    found = []
    for number, chunk in enumerate(profile.chunks):
        ends_in_loss = profile.has_loss and number == len(profile.chunks) - 1
        for entry in profile.layers:
            layers = tuple(layer for layer in chunk if layer in entry.layers)
            if layers:
                last = ends_in_loss and chunk[-1] in layers
                found.append(Block(entry, layers, number, len(layers) - last))
    return sorted(found, key=lambda block: block.layers[0])


@dataclass(frozen=True)
class Windows:
    """Time in ms that the copies of one micro-batch may take without stalling compute."""

    out_ms: float  # infinite for no limit
    in_ms: float
    host_early_ms: float = 0.0  # the device waits unless the host finishes the first forward this much earlier


def bound_windows(profile: Profile) -> Windows:
    """Return upper bounds of the windows. With them the program's optimum is a lower bound of the step time."""
    if profile.pipeline.size > 1:
        # Copies of one micro-batch overlap with other micro-batches, and backward may begin before an offload ends.
        return Windows(inf, inf)
    # Without a pipeline all offloads end by the end of forward, and reloads begin with backward.
    first = profile.chunks[0][:1]
    begin = min((site.saved_at_ms for layer in first for site in profile.of_layer(layer).sites), default=0.0)
    return Windows(
        sum(len(entry.layers) * entry.forward_ms for entry in profile.layers) - begin,
        sum(len(entry.layers) * entry.backward_ms for entry in profile.layers),
    )


def _begin_ms(profile: Profile, block: Block) -> float:
    """Return the time from the start of the chunk's first layer to the block's first save."""
    chunk = profile.chunks[block.chunk]
    before = chunk[: chunk.index(block.layers[0])]
    saved = (site.saved_at_ms for site in block.entry.sites)
    return sum(profile.of_layer(layer).forward_ms for layer in before) + min(saved, default=0.0)


def search_windows(profile: Profile) -> Windows:
    """Return the windows with which the search begins."""
    if profile.pipeline.size == 1:
        return bound_windows(profile)
    whole = micro_batch_ms(profile)  # in a pipeline copies may take the whole time of a micro-batch
    return Windows(whole, whole)


def micro_batch_ms(profile: Profile) -> float:
    """Return the time of forward and backward of one micro-batch without swapping."""
    inside = sum(len(entry.layers) * (entry.forward_ms + entry.backward_ms) for entry in profile.layers)
    return inside + profile.non_layer.forward_ms + profile.non_layer.backward_ms


def step_factor(profile: Profile) -> float:
    """Return the step time in multiples of a micro-batch's time, with the pipeline's bubble."""
    return profile.num_micro_batches + (profile.pipeline.size - 1) / len(profile.chunks)


@dataclass(frozen=True)
class Counts:
    """Numbers of layers in one block that recompute each section, recompute each site and swap each site."""

    sections: dict[str, int]
    recomputed: dict[str, int]
    swapped: dict[str, int]


@dataclass(frozen=True)
class Answer:
    counts: tuple[Counts, ...]  # of each block
    out_exposed_ms: float  # copies of a micro-batch
    in_exposed_ms: float
    host_exposed_ms: float  # the device waits for the host; below 0 the host is that much earlier than needed
    step_ms: float
    bound_ms: float  # lower bound of the step time


class Program:
    # Columns: for each block its sections, recomputed sites, swapped sites, touched layers (which swap), and watched
    # layers (which recompute sites) if the host's time counts. Then, in ms, the exposed time of a micro-batch's
    # offloads, of its reloads, and of the host in the first micro-batch beyond its offloads. Then the peak above static
    # memory in MiB, if the peak is minimised.

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.blocks = blocks(profile)
        self.columns: list[tuple[int, str, str]] = []
        upper: list[float] = []
        for number, block in enumerate(self.blocks):
            eligible = [site for site in block.entry.sites if not site.is_ineligible]
            recomputable = [site.site for site in eligible if site.recompute_ms is not None]
            for kind, names, most in (
                ("section", [part.name for part in block.sections], len(block.layers)),
                ("recompute", recomputable, len(block.layers)),
                ("swap", [site.site for site in eligible if block.num_swappable], block.num_swappable),
                ("touched", [""], len(block.layers)),
                ("watched", [""] if block.entry.host_ms else [], len(block.layers)),
            ):
                self.columns += [(number, kind, name) for name in names]
                upper += [most] * len(names)
        self._index = {column: i for i, column in enumerate(self.columns)}
        self._num_columns = len(self.columns)
        self._out, self._in, self._host, self._peak = range(self._num_columns, self._num_columns + NUM_TIMES + 1)
        self._upper = np.array([*upper, *[np.inf] * (NUM_TIMES + 1)])
        self._integral = np.array([1] * self._num_columns + [0] * (NUM_TIMES + 1))
        self._recompute = self._row()
        self._swapped = self._row()
        self._tie_break = self._row()
        self._count()
        self._live = _live_moments(profile)
        self._later = self._later_columns()

    def _later_columns(self) -> list[tuple[float, np.ndarray]]:
        """Return pairs of a time after forward's first save, in ms, and a mask of the blocks that save from then on."""
        # Their tensors cannot be offloaded earlier, so their window is shorter by that time.
        begins = [_begin_ms(self._profile, block) for block in self.blocks]
        if self._profile.pipeline.size > 1:
            begins = [0.0] * len(self.blocks)  # copies of one micro-batch overlap with other micro-batches
        of_block = np.array([begins[number] for number, _, _ in self.columns] + (NUM_TIMES + 1) * [np.inf])
        first = min(begins, default=0.0)
        return [(begin - first, (of_block >= begin).astype(float)) for begin in sorted(set(begins))]

    def _row(self) -> np.ndarray:
        return np.zeros(self._num_columns + NUM_TIMES + 1)

    def _count(self) -> None:
        """Fill in the recompute time (ms), swapped MiB and tie-break cost of each column."""
        num_layers = sum(len(block.layers) for block in self.blocks)
        for i, (number, kind, name) in enumerate(self.columns):
            block = self.blocks[number]
            sites = {site.site: site for site in block.entry.sites}
            if kind == "section":
                self._recompute[i] = next(part.recompute_ms for part in block.sections if part.name == name)
            elif kind == "recompute":
                self._recompute[i] = sites[name].recompute_ms
            elif kind == "swap":
                self._swapped[i] = sites[name].mib
                self._tie_break[i] = SWAPPED_MIB_COST * sites[name].mib * (1 + block.layers[0] / num_layers / 10)
            elif kind == "touched":
                self._tie_break[i] = TOUCHED_LAYER_COST

    def solve(
        self, budget_gib: float | None, host_gib: float | None, windows: Windows, minimize_memory: bool = False,
        gap: float = PROVEN,
    ) -> Answer | None:  # fmt: skip
        """Return the fastest counts that fit; ``None`` if nothing fits.

        ``budget_gib`` limits the peak, which counts as ``Prediction.peak_gib``. With ``minimize_memory`` the peak is
        minimised instead of the time. At a relative ``gap`` to the optimum the solver may stop.
        """
        profile = self._profile
        rows: list[np.ndarray] = []
        limits: list[float] = []

        def at_most(row: np.ndarray, limit: float) -> None:
            rows.append(row)
            limits.append(limit)

        self._each_site_once(at_most)
        for live, at_loss in self._live:
            row, full = self._memory_row(live)
            if minimize_memory:
                row[self._peak] = -1
                at_most(row, -full - at_loss)
            if budget_gib is not None:
                row = row.copy()
                row[self._peak] = 0
                room = (budget_gib - profile.static_gib - profile.fragments_gib) * MIB_PER_GIB
                at_most(row, room - full - at_loss)
            if host_gib is not None:
                row = self._row()
                for i, (number, kind, _) in enumerate(self.columns):
                    if kind == "swap":
                        row[i] = live[self.blocks[number].chunk] * self._swapped[i]
                at_most(row, host_gib * MIB_PER_GIB)
        if windows.out_ms < inf:
            for late_ms, later in self._later:
                row = self._swapped * later * profile.out_ms_per_mib
                row[self._out] = -1
                at_most(row, max(0.0, windows.out_ms - late_ms))  # a search may narrow a window below zero
        host_row, host_room_ms = self._host_waits(windows.host_early_ms)
        if profile.pipeline.size == 1 and host_row.any():
            at_most(host_row, host_room_ms)
            self._watch_recomputation(at_most)
        if windows.in_ms < inf:
            row = self._swapped * profile.in_ms_per_mib - self._recompute
            row[self._in] = -1
            at_most(row, windows.in_ms)
        factor = step_factor(profile)
        exposed = self._row()
        exposed[[self._out, self._in]] = 1
        time = factor * (self._recompute + exposed)
        time[self._host] = 1  # in later micro-batches the host runs ahead
        cost = self._row()
        if minimize_memory:
            cost[self._peak] = 1
        cost = cost + UNIT * (self._tie_break + (1e-6 if minimize_memory else 1.0) * time)
        found = _optimum(
            cost.tobytes(), self._integral.tobytes(), self._upper.tobytes(), np.array(rows, float).tobytes(),
            np.array(limits, float).tobytes(), gap,
        )  # fmt: skip
        if found is None:
            return None
        x, dual_bound = found
        base = factor * micro_batch_ms(profile) + profile.non_layer.optimizer_ms
        slack = float(self._tie_break[: self._num_columns] @ self._upper[: self._num_columns])
        bound = -np.inf if minimize_memory else base + dual_bound / UNIT - slack
        return Answer(
            self._counts(x), float(x[self._out]), float(x[self._in]),
            float(host_row @ x + x[self._host]) - host_room_ms, base + float(time @ x),
            max(base, float(bound)),
        )  # fmt: skip

    def _each_site_once(self, at_most: Callable[[np.ndarray, float], None]) -> None:
        for number, block in enumerate(self.blocks):
            for site in block.entry.sites:
                row = self._row()
                for part in block.sections:
                    if site in block.freed(part):
                        row[self._index[number, "section", part.name]] = 1
                for kind in ("recompute", "swap"):
                    if (column := self._index.get((number, kind, site.site))) is not None:
                        row[column] = 1
                at_most(row, len(block.layers))
                if (column := self._index.get((number, "swap", site.site))) is not None:
                    at_most(self._difference(column, self._index[number, "touched", ""]), 0)
                    if site.is_unsaved:  # swapped only where a section reads it
                        row = self._row()
                        row[column] = 1
                        for part in block.sections:
                            if site.site in part.needs:
                                row[self._index[number, "section", part.name]] = -1
                        at_most(row, 0)

    def _host_waits(self, early_ms: float) -> tuple[np.ndarray, float]:
        """Return a row and its limit: the first forward takes the host's time and ``early_ms``. Empty if unknown."""
        row, room_ms = self._row(), -early_ms
        for number, block in enumerate(self.blocks):
            own_ms = block.entry.host_ms
            room_ms += len(block.layers) * (block.entry.forward_ms - (1 + HOOKS) * own_ms)
            if not own_ms:
                continue
            row[self._index[number, "watched", ""]] = WATCH * own_ms
            for part in block.sections:
                sites = WHOLE - HOOKS if part.name == LAYER_SECTION else RECOMPUTED_SITE * len(block.freed(part))
                row[self._index[number, "section", part.name]] = sites * own_ms
            for kind, per_site in (("recompute", RECOMPUTED_SITE), ("swap", SWAPPED_SITE)):
                for site in block.entry.sites:
                    if (chosen := self._index.get((number, kind, site.site))) is not None:
                        row[chosen] = per_site * own_ms
        if row.any():
            row[[self._out, self._host]] = -1
        return row, room_ms

    def _watch_recomputation(self, at_most: Callable[[np.ndarray, float], None]) -> None:
        for i, (number, kind, name) in enumerate(self.columns):
            watched = self._index.get((number, "watched", ""))
            if watched is not None and (kind == "recompute" or (kind == "section" and name != LAYER_SECTION)):
                at_most(self._difference(i, watched), 0)

    def _difference(self, column: int, other: int) -> np.ndarray:
        row = self._row()
        row[column], row[other] = 1, -1
        return row

    def _memory_row(self, live: Sequence[int]) -> tuple[np.ndarray, float]:
        """Return the MiB that each column frees, as a negative row, and the MiB held if everything is kept."""
        row, full = self._row(), 0.0
        for block in self.blocks:
            full += live[block.chunk] * len(block.layers) * block.entry.saved_mib
        for i, (number, kind, name) in enumerate(self.columns):
            block = self.blocks[number]
            if kind == "section":
                part = next(part for part in block.sections if part.name == name)
                row[i] = -live[block.chunk] * block.freed_mib(part)
            elif kind in ("recompute", "swap"):
                row[i] = -live[block.chunk] * next(site.mib for site in block.entry.sites if site.site == name)
        return row, full

    def _counts(self, values: np.ndarray) -> tuple[Counts, ...]:
        found = [Counts({}, {}, {}) for _ in self.blocks]
        for i, (number, kind, name) in enumerate(self.columns):
            if kind in ("section", "recompute", "swap"):
                counts = found[number]
                where = {"section": counts.sections, "recompute": counts.recomputed, "swap": counts.swapped}[kind]
                where[name] = round(values[i])
        return tuple(found)


# Searches ask for the same optimum again: over fractions of state, and when a run plans anew. So the arrays are passed
# as their bytes.
@lru_cache(maxsize=128)  # of up to 0.5 MiB each
def _optimum(
    cost: bytes, integral: bytes, upper: bytes, rows: bytes, limits: bytes, gap: float
) -> tuple[np.ndarray, float] | None:
    """Return the solver's optimum and its lower bound of the cost; ``None`` if nothing fits."""
    costs, most = np.frombuffer(cost), np.frombuffer(limits)
    with without_solver_lines():
        done = milp(
            costs, integrality=np.frombuffer(integral, int), bounds=Bounds(0, np.frombuffer(upper)),
            constraints=LinearConstraint(np.frombuffer(rows).reshape(len(most), len(costs)), -np.inf, most),
            options={"mip_rel_gap": gap, "node_limit": MAX_NODES},
        )  # fmt: skip
    if done.x is None:
        return None
    done.x.flags.writeable = False
    return done.x, done.mip_dual_bound


def _live_moments(profile: Profile) -> list[tuple[tuple[int, ...], float]]:
    """Return the worst moments at the end of a forward: live micro-batches of each chunk, and MiB outside layers."""
    num_chunks, size = len(profile.chunks), profile.pipeline.size
    num = min(profile.num_micro_batches, 1 if size == 1 else 3 * size)
    live = [0] * num_chunks
    non_layer = profile.non_layer
    seen: set[tuple[tuple[int, ...], float]] = set()
    last = num_chunks - 1 if profile.has_loss else 0
    for unit in schedule(num, size, profile.pipeline.rank, num_chunks):
        if unit.is_forward:
            live[unit.chunk] += 1
            at_loss = profile.has_loss and unit.chunk == last
            others = (live[last] - (1 if at_loss or unit.chunk == last else 0)) * non_layer.kept_gib
            seen.add((tuple(live), ((non_layer.peak_gib if at_loss else 0.0) + others) * MIB_PER_GIB))
        else:
            live[unit.chunk] -= 1

    def below(one: tuple[tuple[int, ...], float], other: tuple[tuple[int, ...], float]) -> bool:
        smaller = all(a <= b for a, b in zip(one[0], other[0], strict=True)) and one[1] <= other[1]
        return smaller and one != other

    return sorted(one for one in seen if not any(below(one, other) for other in seen))

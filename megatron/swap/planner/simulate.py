"""Simulates a step under a plan: memory in use, and stalls for copies.

The compute stream is a clock. Each copy direction is a queue. Releases and reloads follow the rules of
``megatron.swap.engine``; tests compare the two.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf

from megatron.swap.common.plan import LAYER_SECTION, Plan
from megatron.swap.common.types import Action, LayerPosition, layer_positions
from megatron.swap.planner.assignment import LayerScript, scripts
from megatron.swap.planner.profile import Profile
from megatron.swap.planner.schedule import Unit, most_micro_batches, schedule

MIB_PER_GIB = 1024.0
COMMIT_MIB = 16.0  # offloads start once this much is pending, as COMMIT_BYTES of engine.offload
HOOKS_FROM = 0.03  # part of a step by which predictions are wrong for other reasons than the host's work


@dataclass(frozen=True)
class Prediction:
    """The simulated time and memory of a step. Stalls and recomputation are sums over the step."""

    peak_gib: float  # with static memory and expected fragmentation
    peak_at: str  # place in the step
    step_ms: float
    out_stall_ms: float  # compute waits for offloads
    in_stall_ms: float  # compute waits for reloads
    host_wait_ms: float  # the first forward waits for the host
    recompute_ms: float
    host_gib: float  # peak of host memory for activations
    fragments_gib: float  # in peak_gib
    timeline: tuple[tuple[float, float, str], ...] = field(repr=False)  # (ms, GiB, place) at layer boundaries


def simulate(profile: Profile, plan: Plan) -> Prediction:
    """Predict the step of ``profile`` under ``plan``. Deterministic."""
    # Only the first micro-batches are played, since further ones repeat the last. A pipeline's bubble is (size - 1) /
    # virtual stages of a micro-batch's time.
    size, total = profile.pipeline.size, profile.num_micro_batches
    played = min(total, most_micro_batches(size))
    step = _Step(profile, plan, played)
    times = step.times
    if size == 1:
        each = [now - before for now, before in zip(step.marks[-1], step.marks[-2] if played > 1 else (0.0,) * 4,
                                                    strict=True)]  # fmt: skip
    else:
        fewer = max(size, played - size)
        before = _Step(profile, plan, fewer).times if fewer < played else (0.0,) * 4
        each = [(now - then) / max(1, played - fewer if fewer < played else played)
                for now, then in zip(times, before, strict=True)]  # fmt: skip
    elapsed, out_stall, in_stall, recompute = (
        now + (total - played) * more for now, more in zip(times, each, strict=True)
    )
    fragments_gib = profile.fragments_gib
    if step.host_peak_mib and not _brings_back_inputs_alone(plan):
        fragments_gib = max(fragments_gib, profile.attention_block_gib)
    peak_gib, peak_at = step.peak_mib / MIB_PER_GIB + fragments_gib, step.peak_at
    if profile.loss_block_gib:
        # The logits need one block, and layers have freed memory in pieces: the allocator takes new memory. With
        # copies, the pieces of backward are there in the next forward, too.
        layers_mib = step.layers_peak_mib if step.host_peak_mib else step.before_loss_mib
        beside_gib = layers_mib / MIB_PER_GIB + profile.loss_block_gib
        if beside_gib > peak_gib:
            peak_gib, peak_at = beside_gib, "at the loss, beside what layers have freed"
    if profile.optimizer_gib + profile.fragments_gib > peak_gib:
        fragments_gib = profile.fragments_gib
        peak_gib = profile.optimizer_gib + fragments_gib
        peak_at = "in the optimizer's step" if profile.layers else "outside the layers"
    return Prediction(
        peak_gib=profile.static_gib + peak_gib, peak_at=peak_at,
        step_ms=elapsed + profile.non_layer.optimizer_ms + (size - 1) / len(profile.chunks) * each[0],
        out_stall_ms=out_stall, in_stall_ms=in_stall, host_wait_ms=step.host_wait_ms, recompute_ms=recompute,
        host_gib=step.host_peak_mib / MIB_PER_GIB, fragments_gib=fragments_gib,
        timeline=tuple((at, profile.static_gib + mib / MIB_PER_GIB, where) for at, mib, where in step.timeline),
    )  # fmt: skip


def _brings_back_inputs_alone(plan: Plan) -> bool:
    """Whether each layer that offloads something runs again as a whole: all reloads then have one size."""
    return all(LAYER_SECTION in plan.sections(layer) for layer in plan.layers() if plan.swaps_layer(layer))


@dataclass(eq=False, slots=True)
class _Storage:
    mib: float
    group: _Group
    state: str = "resident"  # or offloading, offloaded, reloading, reloaded, kept
    out_end_ms: float = 0.0
    in_end_ms: float = 0.0


@dataclass(eq=False, slots=True)
class _ForwardPass:
    """One forward of one chunk, with the MiB that its layers keep: ``engine.handle.ForwardPass``."""

    kept_begun_mib: float = 0.0
    kept_over_mib: float = 0.0


@dataclass(eq=False, slots=True)
class _Group:
    """One layer over one micro-batch: ``engine.handle.Group``."""

    position: LayerPosition
    forward_pass: _ForwardPass
    kept_mib: float
    mib: float = 0.0
    prefetched_mib: float = 0.0
    storages: dict[int, _Storage] = field(default_factory=dict)
    to_fetch: list[_Storage] = field(default_factory=list)  # not reloaded yet; backward needs them from the end


def with_measured_step(profile: Profile, plan: Plan, step_ms: float) -> Profile:
    """Return ``profile`` with the ``hook_ms`` that explains why a step under ``plan`` took longer than predicted."""
    # 0 where the difference may have other reasons: below 3 %, with few hooks, with offloaded optimizer state, and in a
    # pipeline, where stages wait for each other.
    hooks = [script.has_hooks for script in scripts(profile, plan).values()]
    hooked = sum(hooks)
    others = profile.pipeline.size > 1 or plan.offload_fraction is not None or 2 * hooked < len(hooks)
    if plan.predicted is None or others:
        return profile
    more_ms = step_ms - plan.predicted.step_ms
    if more_ms < HOOKS_FROM * plan.predicted.step_ms:
        return profile
    return replace(profile, hook_ms=more_ms / (2 * hooked * profile.num_micro_batches))


def _window_groups(plan: Plan, largest_mib: float) -> int:
    """Return the prefetch window in largest groups, as ``ReleaseBudget.window_groups``."""
    if not largest_mib:
        return 0
    return 1 if plan.prefetch_gib is None else int(plan.prefetch_gib * MIB_PER_GIB / largest_mib)


class _Step:
    """Simulates ``num_micro_batches``. Public attributes are the result.

    Memory is counted in program order. The caching allocator gives a freed block to later work of the same stream, so
    the peak does not depend on the speed of copies.
    """

    def __init__(self, profile: Profile, plan: Plan, num_micro_batches: int) -> None:
        self._profile = profile
        self._scripts: dict[int, LayerScript] = scripts(profile, plan)
        self._is_hooked = any(script.has_hooks for script in self._scripts.values())  # False if layers run as they are
        self._now = self._out_free = self._in_free = 0.0
        self._out_stall = self._in_stall = self._recompute = 0.0
        self._mib = self._host_mib = 0.0
        self._offloading: deque[_Storage] = deque()
        self._offloading_mib = self._prefetched_mib = self._uncharged_mib = 0.0
        self._groups: dict[tuple[int, int], _Group] = {}
        self._youngest: _Group | None = None
        self._current: _Group | None = None
        self._cursor = 0
        self.peak_mib = self.host_peak_mib = self.layers_peak_mib = 0.0
        self.before_loss_mib = 0.0  # peak of the layers until the last loss begins
        self.peak_at = ""
        self.host_wait_ms = 0.0
        self.timeline: list[tuple[float, float, str]] = []
        self.marks: list[tuple[float, float, float, float]] = []
        chunks, size, rank = profile.chunks, profile.pipeline.size, profile.pipeline.rank
        self._positions: dict[int, LayerPosition] = {}
        for number, chunk in enumerate(chunks):
            ends_in_loss = profile.has_loss and number == len(chunks) - 1
            positions = layer_positions([plan.swaps_layer(n) for n in chunk], ends_in_loss)
            self._positions.update(zip(chunk, positions, strict=True))
        # The engine learns the largest group in the first forward. From then on it keeps the trailing layers.
        largest_mib = 0.0
        for layer in (layer for chunk in chunks for layer in chunk):
            if not self._positions[layer].is_trailing_kept(_window_groups(plan, largest_mib)):
                largest_mib = max(largest_mib, self._scripts[layer].swapped_mib)
        self._window_groups = _window_groups(plan, largest_mib)
        self._chosen_window_mib = inf if plan.prefetch_gib is None else plan.prefetch_gib * MIB_PER_GIB
        self._window_mib = largest_mib if plan.prefetch_gib is None else self._chosen_window_mib
        self._kept_mib = {layer: self._kept_by(layer) for layer in self._scripts}
        self._kept_after = {
            layer: sum(self._kept_mib[after] for after in chunk[i + 1 :])
            for chunk in chunks for i, layer in enumerate(chunk)
        }
        units = schedule(num_micro_batches, size, rank, len(chunks))
        self._order = [
            (layer, unit.micro_batch)
            for unit in units if not unit.is_forward for layer in reversed(chunks[unit.chunk])
        ]  # fmt: skip
        for unit in units:
            (self._forward if unit.is_forward else self._backward)(unit, chunks[unit.chunk])
            if not unit.is_forward:
                self.marks.append(self.times)

    @property
    def times(self) -> tuple[float, float, float, float]:
        """Elapsed time, stalls for copies out, stalls for copies in, and recomputation, in ms."""
        return self._now, self._out_stall, self._in_stall, self._recompute

    def _kept_by(self, layer: int) -> float:
        """Return the MiB that ``layer`` keeps: slack before its forward saves them and after its backward."""
        tail = self._positions[layer].is_trailing_kept(self._window_groups)
        return sum(
            mib for _, mib, action in self._scripts[layer].saves
            if action is Action.KEEP or (tail and action is Action.SWAP)
        )

    def _forward(self, unit: Unit, chunk: tuple[int, ...]) -> None:
        non_layer = self._profile.non_layer
        forward_pass = _ForwardPass()
        if unit.chunk == 0 and not self._profile.has_loss:
            self._now += non_layer.forward_ms
        # A step begins with an idle device. Later micro-batches follow a backward, in which the host has run ahead.
        is_first = unit.micro_batch == 0 and self._profile.pipeline.size == 1 and self._is_hooked
        host_now = self._now if is_first else -inf
        for layer in chunk:
            self._forward_layer(layer, unit.micro_batch, forward_pass)
            host_now += self._scripts[layer].host_ms + self._hook_ms(self._scripts[layer])
            self.host_wait_ms += max(0.0, host_now - self._now)
            self._now = max(self._now, host_now)
        if self._profile.has_loss and unit.chunk == len(self._profile.chunks) - 1:
            self._now += non_layer.forward_ms
            self.before_loss_mib = self.layers_peak_mib
            self._record_loss(f"at the loss, micro-batch {unit.micro_batch}", non_layer.peak_gib * MIB_PER_GIB)
        if unit.chunk == self._non_layer_chunk:
            self._mib += non_layer.kept_gib * MIB_PER_GIB

    @property
    def _non_layer_chunk(self) -> int:
        """The chunk with the figures outside layers: the last if it ends in the loss, else the first."""
        return len(self._profile.chunks) - 1 if self._profile.has_loss else 0

    def _forward_layer(self, layer: int, micro_batch: int, forward_pass: _ForwardPass) -> None:
        script, position = self._scripts[layer], self._positions[layer]
        begin, waited = self._now, 0.0
        where = f"forward of layer {layer}, micro-batch {micro_batch}"
        group = self._youngest = _Group(position, forward_pass, self._kept_mib[layer])
        self._groups[layer, micro_batch] = group
        keeps_all = position.is_trailing_kept(self._window_groups)
        self._uncharged_mib = group.kept_mib if position.early_release else 0.0
        waited += self._release(layer)
        pending: list[_Storage] = []
        pending_mib = 0.0
        recomputed: list[tuple[float, float]] = []  # a heap: when each is gone, and its size
        for index, (at_ms, mib, action) in enumerate(script.saves):
            while recomputed and recomputed[0][0] <= at_ms:
                self._mib -= heappop(recomputed)[1]
            self._now = begin + waited + at_ms
            self._mib += mib
            # The kernel allocates the storage and its workspace before autograd saves the storage. Releases come after.
            self._record_peak(where, script.beside[index])
            if action is Action.RECOMPUTE:
                heappush(recomputed, (script.gone[index], mib))
            elif action is Action.KEEP or keeps_all:
                if self._uncharged_mib > 0:
                    self._uncharged_mib = max(0.0, self._uncharged_mib - mib)
                    waited += self._release(layer)
            else:
                group.storages[index] = storage = _Storage(mib, group)
                group.mib += mib
                pending.append(storage)
                pending_mib += mib
                if pending_mib >= COMMIT_MIB:
                    self._commit(pending)
                    pending_mib = 0.0
                    waited += self._release(layer)
        group.to_fetch = list(group.storages.values())
        self._now = begin + waited + script.forward_ms + self._hook_ms(script)
        self._record_peak(where, script.forward_peak_mib)
        self._mib -= sum(mib for _, mib in recomputed)
        self._uncharged_mib = 0.0
        self._commit(pending)
        self._release(layer)
        self.timeline.append((self._now, self._mib, where))
        if position.num_after == 0 and not position.ends_in_loss:
            self._prefetch()

    def _hook_ms(self, script: LayerScript) -> float:
        return self._profile.hook_ms if script.has_hooks else 0.0

    def _commit(self, pending: list[_Storage]) -> None:
        for storage in pending:
            self._out_free = max(self._out_free, self._now) + storage.mib * self._profile.out_ms_per_mib
            storage.out_end_ms = self._out_free
            storage.state = "offloading"
            self._offloading.append(storage)
            self._offloading_mib += storage.mib
            self._host_mib += storage.mib
        self.host_peak_mib = max(self.host_peak_mib, self._host_mib)
        pending.clear()

    def _release(self, layer: int) -> float:
        """Release the oldest storages, as ``Offloader.release``. Return the time that compute waited, in ms."""
        allowed = self._kept_after[layer] + self._uncharged_mib
        if not self._positions[layer].ends_in_loss:
            allowed += self._window_mib
        waited = 0.0
        while self._offloading_mib > allowed + 1e-6 and self._offloading[0].group is not self._youngest:
            storage = self._offloading.popleft()
            self._offloading_mib -= storage.mib
            storage.state = "offloaded"
            self._mib -= storage.mib
            waited += max(0.0, storage.out_end_ms - self._now)
            self._now = max(self._now, storage.out_end_ms)
        self._out_stall += waited
        return waited

    def _backward(self, unit: Unit, chunk: tuple[int, ...]) -> None:
        non_layer = self._profile.non_layer
        if unit.chunk == self._non_layer_chunk:
            if self._profile.has_loss:
                self._now += non_layer.backward_ms
            self._mib -= non_layer.kept_gib * MIB_PER_GIB
        for layer in reversed(chunk):
            self._backward_layer(layer, unit.micro_batch)
        if unit.chunk == 0 and not self._profile.has_loss:
            self._now += non_layer.backward_ms

    def _backward_layer(self, layer: int, micro_batch: int) -> None:
        script = self._scripts[layer]
        group = self._current = self._groups.pop((layer, micro_batch))
        where = f"backward of layer {layer}, micro-batch {micro_batch}"
        self._cursor += 1
        group.forward_pass.kept_over_mib = group.forward_pass.kept_begun_mib
        group.forward_pass.kept_begun_mib += group.kept_mib
        self._prefetched_mib -= group.prefetched_mib
        while group.to_fetch:
            self._reload(group.to_fetch.pop())
        self._prefetch()
        storages = group.storages
        begin, temporary_mib, before_mib, changed_at_ms = self._now, 0.0, 0.0, -inf
        for at_ms, kind, i in script.backward_events:
            if begin + at_ms > self._now:
                self._now = begin + at_ms
            if kind == 1:
                # The first level is of an operator that has not begun; the gradient that comes in is unknown.
                before_mib = temporary_mib if i else script.temporaries[i][1]
                temporary_mib, changed_at_ms = script.temporaries[i][1], at_ms
            elif kind == 2 and i >= 0:
                recomputation = script.recomputations[i]
                begin += recomputation.cost_ms
                self._now += recomputation.cost_ms
                self._recompute += recomputation.cost_ms
                self._mib += recomputation.mib
                # It runs as an operator begins: the operator before has freed its memory, this one has not taken its
                # own. Measured temporaries are medians and maxima of several runs, so two of them prove nothing.
                is_between = at_ms == changed_at_ms and self._profile.allocator_gib is None
                beside_mib = min(before_mib, temporary_mib) if is_between else temporary_mib
                self._record_peak(where, beside_mib + recomputation.peak_mib)
            elif kind == 2:
                if -1 - i in storages:
                    begin += self._wait(storages[-1 - i])
            else:
                self._mib -= script.saves[i][1]
                if i in storages and storages[i].state != "kept":
                    self._host_mib -= storages[i].mib
                    self._prefetch()
            if self._mib + temporary_mib > self.layers_peak_mib:
                self._record_peak(where, temporary_mib)
        if script.made_mib and micro_batch == 0:
            self._mib += script.made_mib
            self._record_peak(where, temporary_mib)
        self._now = max(self._now, begin + script.backward_ms + self._hook_ms(script))
        self.timeline.append((self._now, self._mib, where))

    def _wait(self, storage: _Storage) -> float:
        if storage.state != "reloading":
            return 0.0
        waited = max(0.0, storage.in_end_ms - self._now)
        self._now += waited
        self._in_stall += waited
        storage.state = "reloaded"
        return waited

    def _reload(self, storage: _Storage) -> None:
        """Keep ``storage`` if its memory was not released yet, otherwise reload it."""
        if storage.state == "offloading":
            self._offloading.remove(storage)
            self._offloading_mib -= storage.mib
            self._host_mib -= storage.mib
            storage.state = "kept"
        elif storage.state == "offloaded":
            begin = max(self._in_free, self._now, storage.out_end_ms)
            self._in_free = storage.in_end_ms = begin + storage.mib * self._profile.in_ms_per_mib
            storage.state = "reloading"
            self._mib += storage.mib
            self._record_peak("prefetch")

    def _prefetch(self) -> None:
        """Reload ahead of need as far as the budget allows, as ``Reloader.prefetch``."""
        num_kept_between, kept_between_mib = 0, 0.0
        for key in range(self._cursor, len(self._order)):
            group = self._groups.get(self._order[key])
            if group is None:
                return
            if not group.mib:
                num_kept_between += 1
            allowed = self._allowed_prefetch(group, num_kept_between, kept_between_mib) if group.to_fetch else 0.0
            kept_between_mib += group.kept_mib
            while group.to_fetch:
                storage = group.to_fetch[-1]
                if self._prefetched_mib + storage.mib > allowed + 1e-6 and (self._prefetched_mib > 1e-6 or not allowed):
                    return
                group.to_fetch.pop()
                group.prefetched_mib += storage.mib
                self._prefetched_mib += storage.mib
                self._reload(storage)

    def _allowed_prefetch(self, group: _Group, num_kept_between: int, kept_between_mib: float) -> float:
        """Return the MiB that may be prefetched, as ``ReleaseBudget.max_prefetched_bytes``."""
        allowed = self._window_mib
        if num_kept_between >= group.position.num_trailing_kept(self._window_groups):
            allowed = max(0.0, allowed - kept_between_mib)
        if self._current is not None and self._current.forward_pass is group.forward_pass:
            allowed += max(0.0, group.forward_pass.kept_over_mib - self._current.mib)
        return min(allowed, 2 * self._chosen_window_mib)

    def _record_peak(self, where: str, more_mib: float = 0.0) -> None:
        self.layers_peak_mib = max(self.layers_peak_mib, self._mib + more_mib)
        self._record_loss(where, more_mib)

    def _record_loss(self, where: str, more_mib: float) -> None:
        if self._mib + more_mib > self.peak_mib + 1e-6:
            self.peak_mib = self._mib + more_mib
            self.peak_at = where

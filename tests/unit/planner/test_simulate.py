"""The simulator against arithmetic by hand, and against the engine's own manager."""

import random
from dataclasses import replace

import pytest
import torch

from megatron.swap.common.plan import Plan, Predicted
from megatron.swap.common.types import KIB, MIB, Action, Site, UsageError, layer_positions
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine import offload as offload_module
from megatron.swap.engine.handle import Handle
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.policy import PlanPolicy
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.host import HostTier
from megatron.swap.planner.assignment import layer_script
from megatron.swap.planner.profile import LayerClass, NonLayer, NonLayerSite, Pipeline, Profile, Section
from megatron.swap.planner.schedule import Unit, schedule
from megatron.swap.planner.simulate import simulate, with_measured_step
from megatron.swap.planner.solve import empty_plan
from tests.engine import save
from tests.sizes import sized
from tests.unit.planner.cases import GB_S, plan, profile, random_class, site

ONE = LayerClass(tuple(range(4)), 2.0, 4.0, (site("a/0", 100, 1.0, 1.0, 2.0),))
"""Four equal layers of 100 MiB each: 1 ms on the link, 2 ms of forward, 4 ms of backward."""


def gib(mib: float) -> float:
    return pytest.approx(mib / 1024)  # type: ignore[return-value]


def live_peaks(units: list[Unit], num_chunks: int) -> list[tuple[int, ...]]:
    """Return the largest numbers of micro-batches of each chunk that are between forward and backward at once."""
    live = [0] * num_chunks
    seen: set[tuple[int, ...]] = set()
    for unit in units:
        live[unit.chunk] += 1 if unit.is_forward else -1
        if unit.is_forward:
            seen.add(tuple(live))
    return sorted(
        counts
        for counts in seen
        if not any(other != counts and all(a >= b for a, b in zip(other, counts, strict=True)) for other in seen)
    )


class TestByHand:
    @pytest.mark.parametrize("micro_batches", [1, 2, 5])
    def test_what_a_step_took_beyond_its_prediction_is_put_on_the_layers_with_hooks(self, micro_batches: int) -> None:
        of = profile([ONE], micro_batches=micro_batches)
        two = plan(of, {(0, 1): {"a/0": "swap"}})
        before = simulate(of, two)
        two = replace(two, predicted=Predicted(before.peak_gib, before.step_ms, 0.0, before.host_gib))
        more_ms = 0.1 * before.step_ms
        after = with_measured_step(of, two, before.step_ms + more_ms)
        assert after.hook_ms == pytest.approx(more_ms / (2 * 2 * micro_batches))
        assert simulate(after, two).step_ms == pytest.approx(before.step_ms + more_ms)
        assert simulate(after, two).peak_gib == before.peak_gib
        assert simulate(after, empty_plan(of)) == simulate(of, empty_plan(of))
        for other, step_ms in ((two, 1.029 * before.step_ms), (replace(two, offload_fraction=0.5), 2 * before.step_ms)):
            assert with_measured_step(of, other, step_ms) == of, "little, or what has another reason"

    def test_the_logits_take_a_block_beside_the_layers_peak(self) -> None:
        """Without a measured allocator: what layers have freed is in pieces, after copies also what backward has."""
        around = NonLayer(0, 0, 0, 0, 1000 / 1024, (NonLayerSite("loss/0", 900.0, 0.0),))
        entry = replace(ONE, forward_peak_mib=300.0, temporaries=((0.0, 500.0),))
        of = profile([entry], non_layer=around)
        assert simulate(of, empty_plan(of)).peak_gib == gib(400 + 1000)
        unknown = replace(of, allocator_gib=None)
        swapping = plan(of, {(0, 1): {"a/0": "swap"}})
        kept, swapped = (simulate(unknown, one) for one in (empty_plan(of), swapping))
        assert kept.peak_gib == gib(400 + 300 + 900)
        assert swapped.peak_gib == pytest.approx(simulate(profile([entry]), swapping).peak_gib + 900 / 1024)
        assert kept.peak_at == swapped.peak_at == "at the loss, beside what layers have freed"

    def test_a_hidden_layer_costs_memory_only_on_the_host(self) -> None:
        of = profile([ONE], non_layer=NonLayer(0, 0, 0, 0, 200 / 1024))
        predicted = simulate(of, plan(of, {(0,): {"a/0": "swap"}}))
        assert predicted.step_ms == pytest.approx(4 * 6)
        assert predicted.peak_gib == gib(300 + 200)
        assert predicted.host_gib == gib(100)

    def test_a_slow_link_stops_compute_where_the_peak_is(self) -> None:
        of = profile([ONE], gb_s=GB_S / 20)  # 20 ms for 100 MiB
        predicted = simulate(of, plan(of, {(0,): {"a/0": "swap"}}))
        # The copy out begins after 1 ms and ends at 21; the last layer saves its own 100 MiB at 7 ms, which ends its
        # slack, and compute waits from 7 to 21: it ends at 22. Backward of layers 3, 2 and 1 takes 12 ms. The
        # copy in may begin when layer 3 is through and the next layer's backward begins, at 26, and ends at 46; layer 0
        # needs it 1 ms into its backward, at 35.
        assert predicted.out_stall_ms == pytest.approx(14)
        assert predicted.in_stall_ms == pytest.approx(11)
        assert predicted.step_ms == pytest.approx(24 + 25)
        assert predicted.timeline[3][1] == gib(300)

    @pytest.mark.parametrize(("before", "after"), [(30, 80), (80, 30), (30, 30)])
    def test_a_section_runs_between_two_operators(self, before: float, after: float) -> None:
        """What one has freed and the other has not taken yet does not count beside it, unless it was measured."""
        sites = (site("in/0", 10, 0.1, 3.0, 4.0), site("a/0", 100, 1.0, 1.0, 2.0))
        section = Section("behind", ("a/0",), ("in/0",), 1.5, peak_mib=60)
        entry = LayerClass((0,), 2.0, 4.0, sites, (section,), temporaries=((0.0, before), (1.0, after)))
        measured = profile([entry])
        of_plan = plan(measured, {(0,): {}}, l0=("behind",))
        assert simulate(measured, of_plan).peak_gib == gib(10 + 100 + 60 + after)
        predicted = simulate(replace(measured, allocator_gib=None), of_plan)
        assert predicted.peak_gib - predicted.fragments_gib == gib(10 + 100 + max(after, 60 + min(before, after)))

    def test_recomputed_sites_imply_their_section(self) -> None:
        """The engine recomputes them together: recomputing one costs as much as recomputing all."""
        sites = (site("in/0", 10, 0.1, 3.0, 4.0), site("a/0", 100, 1.0, 2.0, 3.0), site("b/0", 40, 1.5, 1.0, 2.0))
        section = Section("behind a/0", ("a/0", "b/0"), ("in/0",), 1.5, 60)
        entry = LayerClass((0,), 2.0, 4.0, sites, (section, Section("layer", ("a/0", "b/0"), ("in/0",), 9.0)))
        both = layer_script(entry, {"a/0": Action.RECOMPUTE, "b/0": Action.RECOMPUTE}, ())
        assert both == layer_script(entry, {}, ("behind a/0",))
        assert [(one.at_ms, one.cost_ms, one.mib, one.peak_mib) for one in both.recomputations] == [(1.0, 1.5, 140, 60)]
        alone = layer_script(entry, {"a/0": Action.RECOMPUTE}, ())
        (only,) = alone.recomputations
        assert (only.at_ms, only.cost_ms, only.mib, only.peak_mib) == (2.0, 1.5, 100, 60)
        with pytest.raises(UsageError, match="cannot be recomputed alone"):
            layer_script(replace(entry, sections=entry.sections[1:]), {"a/0": Action.RECOMPUTE}, ())

    def test_a_chain_is_recomputed_in_order_once_and_held(self) -> None:
        """c is recomputed from b, and b from a, which is offloaded. All happens when c is needed, which is first."""
        sites = (
            site("a/0", 100, 0.1, 3.0, 4.0),
            site("b/0", 40, 1.0, 2.0, 3.0, recompute_ms=0.5, recompute_needs=("a/0",)),
            site("c/0", 20, 1.5, 0.0, 1.0, recompute_ms=0.25, recompute_needs=("b/0",)),
        )
        entry = LayerClass((0, 1), 2.0, 4.0, sites)
        script = layer_script(entry, {"c/0": Action.RECOMPUTE, "b/0": Action.RECOMPUTE, "a/0": Action.SWAP}, ())
        assert [(one.at_ms, one.cost_ms, one.mib) for one in script.recomputations] == [(0.0, 0.5, 40), (0.0, 0.25, 20)]
        assert script.needs == ((0.0, 4.0), (0.0, 3.0), (0.0, 1.0))
        alone = layer_script(entry, {"b/0": Action.RECOMPUTE}, ())
        assert [one.at_ms for one in alone.recomputations] == [2.0]
        assert alone.needs == ((2.0, 4.0), (2.0, 3.0), (0.0, 1.0))
        of = profile([entry], gb_s=GB_S / 20)
        predicted = simulate(of, plan(of, {(0,): {"a/0": "swap", "b/0": "recompute", "c/0": "recompute"}}))
        assert predicted.recompute_ms == pytest.approx(0.75)
        kept = simulate(of, plan(of, {(0,): {"a/0": "swap"}}))
        # Recomputation takes 0.75 ms after the wait and does not overlap with it. a is needed 3 ms earlier.
        assert predicted.in_stall_ms == pytest.approx(kept.in_stall_ms + 3.0)

    def test_gradients_that_a_step_makes_grow_in_its_first_backward(self) -> None:
        entry = replace(ONE, temporaries=((0.0, 30.0), (4.0, 10.0)), made_mib=250.0)
        of = profile([entry])
        predicted = simulate(of, empty_plan(of))
        assert predicted.peak_gib == gib(4 * 250 + 10)
        assert predicted.peak_at == "backward of layer 0, micro-batch 0"
        twice = replace(of, num_micro_batches=2)
        assert simulate(twice, empty_plan(twice)).peak_gib == gib(4 * 100 + 30 + 4 * 250), "they stay"


def test_a_source_is_held_only_where_it_is_read() -> None:
    """A norm's 20 MiB are made again from 10 that nobody saves, the whole layer from an input of 5."""
    source, inputs = "source/3", "checkpoint/0"
    sites = (site("norm/0", 20, 0.2, 2.0, 3.0), site(source, 10, 0.2, 2.0, 3.0), site("mlp/0", 20, 0.8, 1.0, 1.5),
             site(inputs, 5, 0.0, 0.0, 3.0))  # fmt: skip
    part, whole = (Section("behind norm/0", ("norm/0",), (source,), 0.2),
                   Section("layer", ("norm/0", "mlp/0"), (inputs,), 1.0))  # fmt: skip
    entry = LayerClass((0,), 1.0, 3.0, sites, (part, whole))
    keep, swap, again = Action.KEEP, Action.SWAP, Action.RECOMPUTE

    def saves(actions: dict[str, Action], *sections: str) -> list[tuple[float, Action]]:
        return [(mib, action) for _, mib, action in layer_script(entry, actions, sections).saves]

    assert entry.saved_mib == 40
    assert saves({}) == [(20, keep), (20, keep)]
    assert saves({"norm/0": again}) == [(20, again), (10, keep), (20, keep)]
    assert saves({"norm/0": again, source: swap, "mlp/0": swap}) == [(20, again), (10, swap), (20, swap)]
    assert saves({}, "layer") == [(20, again), (20, again), (5, keep)]


class TestPipelines:
    @pytest.mark.parametrize(("size", "rank", "most"), [(1, 0, 1), (4, 0, 4), (4, 1, 3), (4, 3, 1)])
    def test_micro_batches_in_flight_under_1f1b(self, size: int, rank: int, most: int) -> None:
        assert live_peaks(schedule(8, size, rank), 1) == [(most,)]
        of = profile([ONE], micro_batches=8, pipeline=Pipeline(size, rank))
        predicted = simulate(of, empty_plan(of))
        assert predicted.peak_gib == gib(400 * most)
        assert predicted.step_ms == pytest.approx(24 * 8 + (size - 1) * 24)

    def test_interleaving_holds_more_of_the_first_chunk(self) -> None:
        chunks = ((0, 1), (2, 3))
        of = profile([ONE], micro_batches=8, non_layer=NonLayer(0, 0, 0, 0.1, 0), pipeline=Pipeline(4, 0, chunks))
        units = schedule(8, 4, 0, 2)
        assert live_peaks(units, 2) == [(7, 4), (8, 3)]
        assert len(units) == len(set(units)) == 32
        assert {unit.micro_batch for unit in units} == set(range(8))
        assert simulate(of, empty_plan(of)).peak_gib == gib(11 * 200 + 8 * 102.4), "the first chunk keeps more"


class EngineStep:
    """Runs a step with the engine's manager, with a KiB for each MiB: MiB on the device at each layer boundary."""

    def __init__(self, of: Profile, what: Plan) -> None:
        self._of, self._what = of, what
        self._pool = HostPool(limit=64 * MIB, slab_bytes=MIB, pinned=False, poison=False)
        self._manager = SwapManager(EmulatedDevice(), HostTier(self._pool), PlanPolicy(what))
        (chunk,) = of.chunks
        self._places = layer_positions([what.swaps_layer(layer) for layer in chunk], ends_in_loss=True)
        self._saved: dict[int, list[tuple[torch.Tensor | None, tuple[Handle, int] | None]]] = {}
        self.levels: list[float] = []

    def step(self) -> list[float]:
        self.levels.clear()
        groups = {}
        for layer, place in enumerate(self._places):
            groups[layer] = self._manager.begin_forward(layer, place)
            frame = []
            self._saved[layer] = []
            for number, one in enumerate(self._of.of_layer(layer).sites):
                tensor = torch.empty(int(one.mib * KIB), dtype=torch.uint8)
                taken = save(self._manager, tensor, Site(layer, f"m{number}", 0), groups[layer])
                self._saved[layer].append((tensor if taken is None else None, taken))
                frame.append(tensor)
            self._manager.end_forward(groups[layer])
            del tensor, frame
            self.levels.append(self._level())
        for layer in reversed(range(len(self._places))):
            self._manager.begin_backward(groups[layer])
            while self._saved[layer]:
                taken = self._saved[layer][-1][1]
                if taken is not None:
                    self._manager.reload.fetch(taken[0], groups[layer], taken[1])
                del taken
                self._saved[layer].pop()
            self.levels.append(self._level())
        return self.levels

    def _level(self) -> float:
        held = 0
        for saved in self._saved.values():
            for tensor, taken in saved:
                storage = tensor.untyped_storage() if tensor is not None else taken and taken[0].storage
                held += storage.nbytes() if storage is not None else 0
        return held / KIB

    def close(self) -> None:
        self._manager.drain()
        self._pool.close()


@pytest.mark.parametrize("seed", range(sized(8, 8, 16)))
def test_the_simulator_holds_as_much_as_the_engine(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They agree at every layer boundary of both passes, for layers that swap all, nothing, or a part."""
    monkeypatch.setattr(offload_module, "COMMIT_BYTES", 16 * KIB)
    source = random.Random(seed)
    num_layers, num_sites = source.randint(2, 10), source.randint(1, 4)
    entry = random_class(source, tuple(range(num_layers)), num_sites)
    # Backward uses storages in reverse order and frees each at once, as ``EngineStep`` does.
    sites = tuple(
        site(one.site, one.mib, one.saved_at_ms, num_sites - i, num_sites - i + 0.5)  # without other references
        for i, one in enumerate(entry.sites)
    )
    of = profile([replace(entry, sites=sites, sections=(), backward_ms=num_sites + 1.0)])
    style = source.choice(["all or nothing", "a part", "anything"])
    part = [source.random() < 0.5 for _ in sites]
    classes = {}
    for layer in range(num_layers):
        whole = source.random() < 0.6
        chosen = [whole if style == "all or nothing" else whole and part[i] if style == "a part"
                  else source.random() < 0.5 for i in range(num_sites)]  # fmt: skip
        classes[layer,] = {f"m{i}/0": "swap" if yes else "keep" for i, yes in enumerate(chosen)}
    what = plan(of, classes)
    engine = EngineStep(of, what)
    try:
        for _ in range(3):  # it learns group sizes and the order, then which layers are kept, then their slack
            engine.step()
        levels = engine.step()
    finally:
        engine.close()
    predicted = [gib_ * 1024 for _, gib_, _ in simulate(of, what).timeline[: 2 * num_layers]]
    assert predicted == pytest.approx(levels), what

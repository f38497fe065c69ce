"""Profiles of handwritten recordings: times without the engine's work, memory besides saved storages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.swap.common.plan import Infeasible
from megatron.swap.common.types import GIB, MIB, SwapError
from megatron.swap.planner.host_time import WHOLE_LAYER
from megatron.swap.planner.profile import Device, LayerClass, Link, NonLayer, NonLayerSite, Pipeline, Profile, Section
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import empty_plan, solve, whole_layers
from megatron.swap.profiling.profile_builder import _without_cycles, build_profile, with_recorded_times
from megatron.swap.profiling.recording import EVALUATION, NonLayerStorage, PassKey, Recording, SavedStorage, What
from tests.unit.planner.cases import model
from tests.unit.profiling.handwritten import STATIC, Layer, Script, pass_through, recompute, steps


def built(recording: Recording, num_micro_batches: int = 1, **options: object) -> Profile:
    return build_profile(
        recording, model(), Link(1, 1, 1, 1), Device("made up", 80.0), num_micro_batches=num_micro_batches,
        source="by hand", **options,  # type: ignore[arg-type]
    )  # fmt: skip


def with_forward(number: int, *between: tuple[str, float, str, float]) -> Script:
    """Record one layer, with the engine's work ``between`` its two saves."""
    script, layer = Script(), Layer(number)
    script.note(What.STEP).note(What.FORWARD_BEGIN, pass_key=layer.key).after(1).save(layer.inner)
    for work in between:
        script.work(*work)
    script.after(2).blip(7).save(layer.outer).after(1).note(What.FORWARD_END, pass_key=layer.key)
    layer.backward(script)
    script.note(What.STEP)
    return script


def times(entry: LayerClass) -> dict[str, tuple[float, float, float]]:
    return {site.site: (site.saved_at_ms, site.needed_at_ms, site.done_at_ms) for site in entry.sites}


class TestALayer:
    def test_times_sizes_and_memory(self) -> None:
        (entry,) = built(steps(Script(), [[Layer(0), Layer(1)]])).layers
        assert (entry.layers, entry.forward_ms, entry.backward_ms) == ((0, 1), 4, 7)
        assert times(entry) == {"in/0": (1, 4, 6), "out/0": (3, 1, 3)}
        assert [site.mib for site in entry.sites] == [10, 30]
        assert entry.forward_peak_mib == 0  # 7 MiB of workspace before the 30 MiB are saved
        # First 0; 5 MiB of gradients before `out` is freed; 2 MiB more for an instant; then 0.
        assert entry.temporaries == ((1, 5), (4, 7), (6, 0))

    @pytest.mark.parametrize("are_made", [True, False])
    def test_gradients_that_a_step_makes_are_no_temporaries(self, are_made: bool) -> None:
        script, layers = Script(), [Layer(number) for number in range(3)]
        script.note(What.STEP)
        for layer in layers:
            layer.forward(script)
        script.use(20)  # the output layer's
        made = 20
        for layer in reversed(layers):
            script.note(What.BACKWARD_BEGIN, pass_key=layer.key, num_bytes=made * MIB * are_made).after(1)
            script.note(What.ASKED, storage=layer.outer).use(100).note(What.ASKED, storage=layer.inner)
            made += 100
            script.free(layer.outer).free(layer.inner)
            script.note(What.BACKWARD_END, pass_key=layer.key, num_bytes=made * MIB * are_made)
        script.use(-made).note(What.STEP)
        profile = built(script.recording)
        (entry,) = profile.layers
        assert entry.made_mib == (100 if are_made else 0)
        assert max(mib for _, mib in entry.temporaries) == (120 if are_made else 320)
        assert profile.optimizer_gib == 320 * MIB / GIB

    @pytest.mark.parametrize(
        ("makes", "mean"),
        [({(1, 0): 60, (0, 0): 60, (1, 1): 40, (0, 1): 40}, 100), ({(0, 0): 90}, 45), ({(0, 1): 30, (1, 1): 90}, 60)],
        ids=["experts of a later micro-batch", "shared by both layers", "all in the second micro-batch"],
    )
    def test_gradients_count_once_in_a_step(self, makes: dict[tuple[int, int], int], mean: int) -> None:
        """By layer and micro-batch: MiB that its backward makes, in gradients that stay."""
        script, made = Script().note(What.STEP), 0
        for micro_batch in range(2):
            layers = [Layer(number, micro_batch) for number in range(2)]
            for layer in layers:
                layer.forward(script)
            for layer in reversed(layers):
                script.note(What.BACKWARD_BEGIN, pass_key=layer.key, num_bytes=made * MIB).after(1)
                more = makes.get((layer.key.layer, micro_batch), 0)
                script.note(What.ASKED, storage=layer.outer).use(more).note(What.ASKED, storage=layer.inner)
                made += more
                script.free(layer.outer).free(layer.inner)
                script.note(What.BACKWARD_END, pass_key=layer.key, num_bytes=made * MIB)
        (entry,) = built(script.use(-made).note(What.STEP).recording, num_micro_batches=2).layers
        assert entry.made_mib == mean

    @pytest.mark.parametrize("work", ["wait", "release", "recompute", "trial", "bring_back", "swap_out"])
    def test_the_engines_work_takes_no_time(self, work: str) -> None:
        plain = built(with_forward(0).recording)
        disturbed = built(with_forward(0, (work, 5.0, "layers.0/in/0 mb0", 0.0)).recording)
        assert times(disturbed.layers[0]) == times(plain.layers[0])
        assert disturbed.layers[0].forward_ms == plain.layers[0].forward_ms == 4
        assert disturbed.non_layer.optimizer_ms == plain.non_layer.optimizer_ms == 0

    def test_the_recorder_takes_no_time(self) -> None:
        def recorded(noting_ms: float) -> Recording:
            script = Script(noting_ms)
            return steps(script, [[Layer(0, again_ms=0.5), Layer(1, again_ms=0.5)], [Layer(0, 1), Layer(1, 1)]])

        assert built(recorded(0.25)) == built(recorded(0.0))

    def test_nested_work_counts_once_and_recomputation_counts_without_waits(self) -> None:
        script, layer = Script(), Layer(0)
        label = "layers.0/out/0 mb0"
        script.note(What.STEP)
        layer.forward(script)
        script.note(What.BACKWARD_BEGIN, pass_key=layer.key).after(1).note(What.ASKED, storage=layer.outer)
        script.note(What.WORK_BEGIN, work="recompute", of=label).after(0.5).work("wait", 3.0, "layers.0/in/0 mb0")
        script.after(0.25).note(What.WORK_END, work="recompute", of=label).after(1)
        script.note(What.ASKED, storage=layer.inner).after(1).note(What.BACKWARD_END, pass_key=layer.key)
        (entry,) = built(script.note(What.STEP).recording).layers
        assert entry.backward_ms == 3
        assert entry.sites[1].recompute_ms == 0.75
        assert times(entry)["in/0"] == (1, 2, 3)

    def test_an_evaluation_before_a_step_is_no_part_of_it(self) -> None:
        def profile(*evaluations_ms: float) -> Profile:
            script, layer = Script(), Layer(0)
            script.note(What.STEP).after(1)
            for ms in evaluations_ms:
                script.work(EVALUATION, ms)
            layer.forward(script.note(What.CHUNK_BEGIN).after(3))
            script.note(What.CHUNK_END)
            layer.backward(script)
            return built(script.after(9).note(What.STEP).recording)

        assert profile().non_layer.optimizer_ms == 10
        assert profile(1000.0) == profile()

    def test_reloaded_storages_count_as_saved(self) -> None:
        script, first, last = Script(), Layer(0, is_held=True), Layer(1)
        script.note(What.STEP)
        first.forward(script)
        last.forward(script)
        script.free(first.outer)
        script.note(What.BACKWARD_BEGIN, pass_key=last.key)
        script.note(What.WORK_BEGIN, work="bring_back").use(30)
        script.note(What.ARRIVED, storage=first.outer, num_bytes=30 * MIB).note(What.WORK_END, work="bring_back")
        script.after(1).free(last.outer).free(last.inner).note(What.BACKWARD_END, pass_key=last.key)
        first.backward(script)
        profile = built(script.note(What.STEP).recording)
        assert profile.of_layer(1).temporaries == ()
        assert profile.of_layer(0).temporaries == ((1, 5), (4, 7), (6, 0))

    def test_storages_held_beyond_the_backward_are_not_the_layers(self) -> None:
        """They add to what the next micro-batch saves."""
        script, first, second = Script(), Layer(0, is_held=True), Layer(0, 1)
        first.forward(script.note(What.STEP))
        script.note(What.BACKWARD_BEGIN, pass_key=first.key).free(first.outer).after(1)
        second.forward(script.note(What.BACKWARD_END, pass_key=first.key))
        script.free(first.inner)
        second.backward(script)
        (entry,) = built(script.note(What.STEP).recording, 2).layers
        assert entry.forward_peak_mib == 10

    @pytest.mark.parametrize("is_table_held", [None, True, False], ids=["alone", "held table", "table that may go"])
    def test_unsaved_intermediates_make_a_section(self, is_table_held: bool | None) -> None:
        """Two sites of 30 MiB are recomputed through one unsaved intermediate of 40 MiB, which takes 4 ms.

        One of them may read a table of another micro-batch, which all layers share. If nothing else holds the table,
        there is no section. The other site has no cheap recompute time then, because it needs the 4 ms too.
        """
        script, layer = Script(), Layer(0)
        intermediate = SavedStorage(layer.key, "out/0+1", 40 * MIB, is_intermediate=True)
        other = SavedStorage(layer.key, "out/1", 30 * MIB, producer="norm", recompute_inputs=(layer.inner,))
        layer.outer.intermediates = other.intermediates = (intermediate.site,)
        if is_table_held is not None:
            table = SavedStorage(PassKey(0, 5), "table/0", 2 * MIB, has_external_refs=is_table_held)
            layer.outer.recompute_inputs += (table,)
        script.note(What.STEP).note(What.FORWARD_BEGIN, pass_key=layer.key)
        script.save(layer.inner).save(layer.outer).save(other)
        script.free(layer.outer).free(other).note(What.FORWARD_END, pass_key=layer.key)
        script.note(What.BACKWARD_BEGIN, pass_key=layer.key).after(1)
        for one, ms in ((layer.outer, 1), (other, 2)):
            script.note(What.ASKED, storage=one)
            if one is layer.outer:
                recompute(script, intermediate, 4)
            recompute(script, one, ms)
        script.free(intermediate).after(1).free(layer.outer).free(other).after(1).free(layer.inner)
        (entry,) = built(script.note(What.BACKWARD_END, pass_key=layer.key).note(What.STEP).recording).layers
        expected = () if is_table_held is False else (Section("behind out/0", ("out/0", "out/1"), ("in/0",), 7, 40),)
        assert entry.sections == expected
        assert [site.recompute_ms for site in entry.sites] == [None] * 3
        assert entry.temporaries == ()

    def test_passes_with_trials_are_not_timed_if_there_are_others(self) -> None:
        script = with_forward(0, ("trial", 1.0, "layers.0/out/0", 0.0))
        assert built(script.recording).layers[0].forward_ms == 4
        script.events.pop()  # the step goes on with a second micro-batch
        layer = Layer(0, 1)
        script.note(What.FORWARD_BEGIN, pass_key=layer.key).after(0.5).save(layer.inner).save(layer.outer)
        script.note(What.FORWARD_END, pass_key=layer.key)
        layer.backward(script)
        (entry,) = built(script.note(What.STEP).recording).layers
        assert (entry.forward_ms, times(entry)["in/0"][0]) == (0.5, 0.5)


class TestClasses:
    def test_layers_that_are_equal_within_a_percent_are_a_class(self) -> None:
        layers = [Layer(0, is_held=True), Layer(1), Layer(2, scale=1.005), Layer(3, scale=1.5)]
        profile = built(steps(Script(), [layers]))
        assert [entry.layers for entry in profile.layers] == [(0,), (1, 2), (3,)]
        assert [entry.sites[0].is_ineligible for entry in profile.layers] == [True, False, False]
        assert [round(entry.sites[1].mib, 2) for entry in profile.layers] == [30, 30.15, 45]

    def test_sizes_that_vary_make_no_classes(self) -> None:
        micro_batches = [[Layer(n, mb, scale=1 + 0.2 * mb * n) for n in range(3)] for mb in range(2)]
        (entry,) = built(steps(Script(), [micro_batches[0][1:], micro_batches[1][1:]]), 2).layers
        assert entry.layers == (1, 2)
        assert entry.sites[1].mib == pytest.approx(30 * 1.4)

    def test_small_sites_are_ineligible(self) -> None:
        (entry,) = built(steps(Script(), [[Layer(0)]]), min_mib=10.5).layers
        assert [site.is_ineligible for site in entry.sites] == [True, False]

    def test_recomputation_needs_a_cost_and_inputs_in_its_own_layer(self) -> None:
        recording = steps(Script(), [[Layer(0, again_ms=1.5)]])
        (entry,) = built(recording).layers
        assert (entry.sites[1].recompute_ms, entry.sites[1].recompute_needs) == (1.5, ("in/0",))
        assert entry.sites[0].recompute_ms is None
        for storage in {event.storage for event in recording.events if event.storage}:
            if storage.recompute_inputs:
                storage.recompute_inputs = (Layer(7).inner,)
        (entry,) = built(recording).layers
        assert (entry.sites[1].recompute_ms, entry.sites[1].recompute_needs) == (None, ())
        (entry,) = built(steps(Script(), [[Layer(0)]])).layers
        assert entry.sites[1].recompute_ms is None  # never recomputed

    def test_whole_layers_are_recomputed_from_their_input(self) -> None:
        recording = steps(Script(), [[Layer(0)]])
        assert built(recording).layers[0].sections == ()
        assert built(recording, whole_layers=True).layers[0].sections == (Section("layer", ("out/0",), ("in/0",), 4),)

    def test_a_layer_that_cannot_be_recomputed_from_its_input_is_a_class(self) -> None:
        layers = [Layer(number) for number in range(3)]
        layers[0].inner.is_input = False
        profile = built(steps(Script(), [layers]), whole_layers=True)
        assert [(entry.layers, len(entry.sections)) for entry in profile.layers] == [((0,), 0), ((1, 2), 1)]


class TestAStep:
    def test_outside_the_layers(self) -> None:
        recording = steps(Script(), [[Layer(0, mb), Layer(1, mb)] for mb in range(3)])
        profile = built(recording, num_micro_batches=3)
        # 3 ms before and 4 ms after each micro-batch, 2 ms of loss. The last 4 ms count as the optimizer's.
        assert profile.non_layer == NonLayer(3, 6, 9, 0, 50 / 1024)
        assert profile.static_gib == STATIC / GIB
        simulated = simulate(profile, empty_plan(profile))
        assert simulated.step_ms == pytest.approx(recording.events[-1].at_ms)
        assert simulated.peak_gib * GIB == pytest.approx(max(event.peak_bytes for event in recording.events))

    def test_sites_outside_the_layers(self) -> None:
        """The profile has the sites of the chunk with the loss, with the most bytes and the least idle time. A storage
        counts as held if it was held in one micro-batch."""

        def one(site: str, mib: float, *at_ms: float, chunk: int = 0, is_held: bool = False) -> NonLayerStorage:
            times = dict(zip((What.SAVED, What.ASKED, What.FREED), at_ms, strict=False))
            return NonLayerStorage(chunk, site, int(mib * MIB), is_held, times)

        unasked = NonLayerStorage(0, "unasked/0", 2 * MIB, at_ms={What.SAVED: 1.0, What.FREED: 4.0})
        saved = (
            one("early/0", 8, 1, 30, 31, is_held=True), one("loss/0", 40, 9, 10, 12), one("loss/1", 0.5, 9, 10, 12),
            unasked, one("early/0", 9, 40, 60, 61), one("loss/0", 30, 48, 52, 53), one("loss/0", 90, 70),
            one("x/0", 7, 70), one("other/0", 5, 1, 2, 3, chunk=1),
        )  # fmt: skip
        events = steps(Script(), [[Layer(0)]]).events
        plain, named = built(Recording(events), min_mib=1), built(Recording(events, non_layer=saved), min_mib=1)
        assert named.non_layer.sites == (
            NonLayerSite("early/0", 9, 20, "held"), NonLayerSite("loss/0", 40, 1),
            NonLayerSite("loss/1", 0.5, 1, "small"),
            NonLayerSite("unasked/0", 2, 3),
        )  # fmt: skip
        assert replace(named, non_layer=replace(named.non_layer, sites=())) == plain
        assert simulate(named, empty_plan(named)) == simulate(plain, empty_plan(plain))

    def test_the_allocator(self) -> None:
        recording = steps(Script(), [[Layer(0)]])
        peak = max(event.peak_bytes for event in recording.events)
        for more, held in ((3 * GIB, 3.0), (-GIB, 0.0)):
            assert built(Recording(recording.events, peak + more)).allocator_gib == held
        assert built(recording).allocator_gib == 0

    def test_a_rank_without_loss_has_no_peak_there(self) -> None:
        recording = steps(Script(), [[Layer(0), Layer(1)]])
        non_layer = built(recording, pipeline=Pipeline(2, 0, ((0, 1),))).non_layer
        assert non_layer == NonLayer(3, 0, 13, 0, 0)
        non_layer = built(recording, pipeline=Pipeline(2, 1, ((0, 1),))).non_layer
        assert non_layer == NonLayer(3, 2, 0, 0, 50 / 1024)  # 13 ms, less 14 ms of backward on the rank before it

    def test_bytes_kept_outside_count_once_a_micro_batch(self) -> None:
        """The second forward of a first stage begins with the storages of the first one."""
        script, layers = Script().note(What.STEP), [Layer(0), Layer(0, 1)]
        for layer in layers:
            layer.forward(script.note(What.CHUNK_BEGIN).use(64))
            script.note(What.CHUNK_END)
        for layer in layers:
            layer.backward(script)
            script.use(-64)
        recording = script.note(What.STEP).recording
        for rank, kept_mib in ((0, 64), (1, 128)):
            non_layer = built(recording, 2, pipeline=Pipeline(2, rank, ((0,),))).non_layer
            assert non_layer.kept_gib == kept_mib / 1024

    def test_copies_of_gradients_between_steps_are_neither_static_nor_activations(self) -> None:
        """Megatron copies gradients of 16 bits before the optimizer's step, and frees the copies before a forward."""
        script = Script()
        for number in range(2):
            script.note(What.STEP).work(EVALUATION, 5, mib=900).use(-300 * number)
            pass_through(script, [Layer(0, is_held=True), Layer(1)])
            script.use(300)
        profile = built(script.note(What.STEP).recording)
        assert profile.static_gib == STATIC / GIB
        assert profile.optimizer_gib == 300 * MIB / GIB
        assert max(mib for entry in profile.layers for _, mib in entry.temporaries) < 100
        prediction = simulate(profile, empty_plan(profile))
        assert prediction.peak_gib * GIB == pytest.approx(STATIC + 300 * MIB)
        assert prediction.peak_at == "in the optimizer's step"
        with pytest.raises(Infeasible, match=r"no plan stays below 1\.2 GiB"):
            solve(profile, 1.2)
        assert solve(profile, 1.3).prediction.peak_gib == prediction.peak_gib

    @pytest.mark.parametrize("freed_mib", [0, 15, 17])
    def test_a_batch_that_the_next_one_replaces_is_static(self, freed_mib: int) -> None:
        script = Script().use(freed_mib).note(What.STEP).use(-freed_mib)
        pass_through(script, [Layer(0)])
        profile = built(script.use(freed_mib).note(What.STEP).recording)
        assert (profile.static_gib * GIB - STATIC) / MIB == (freed_mib if freed_mib < 16 else 0)


def whole(
    num_layers: int, forward_ms: float, again_ms: float, backward_ms: float, host_ms: float = 0.0
) -> Recording:
    """Record a step as ``steps`` does, with layers that are recomputed as a whole and whose saves are not recorded."""
    script, runs = Script(), [PassKey(number, 0) for number in range(num_layers)]
    script.note(What.STEP).note(What.CHUNK_BEGIN).after(3)
    for run in runs:
        script.note(What.FORWARD_BEGIN, pass_key=run, host_at_ms=50.0).after(forward_ms)
        script.note(What.FORWARD_END, pass_key=run, host_at_ms=50.0 + host_ms)
    script.note(What.CHUNK_END).after(2)
    for run in reversed(runs):
        script.note(What.BACKWARD_BEGIN, pass_key=run).work("recompute", again_ms, of=run.label)
        script.after(backward_ms).note(What.BACKWARD_END, pass_key=run)
    return script.after(4 + 9).note(What.STEP).recording


class TestTimesOfOtherSteps:
    def test_they_replace_recorded_times(self) -> None:
        recorded = built(steps(Script(), [[Layer(0), Layer(1)]]), whole_layers=True)
        timed = with_recorded_times(recorded, [whole(2, forward_ms=2, again_ms=2.5, backward_ms=3.5)])
        (entry,) = timed.layers
        assert (entry.forward_ms, entry.backward_ms) == (2, 3.5)
        assert times(entry) == {"in/0": (0.5, 2, 3), "out/0": (1.5, 0.5, 1.5)}
        assert entry.temporaries == ((0.5, 5), (2, 7), (3, 0))
        assert entry.sections == (Section("layer", ("out/0",), ("in/0",), 2.5),)
        assert [site.mib for site in entry.sites] == [10, 30]
        assert timed.non_layer == recorded.non_layer

    def test_the_hosts_time_is_the_least_and_that_of_layers_with_hooks_is_not_known(self) -> None:
        """The host waits when its queue is full. Hooks take it longer."""
        recording = steps(Script(), [[Layer(0), Layer(1)]])
        recorded = built(recording, whole_layers=True)
        timed = [whole(2, forward_ms=2, again_ms=2.5, backward_ms=3.5, host_ms=ms) for ms in (1.1, 2.0, 2.0)]
        (entry,) = with_recorded_times(recorded, timed, WHOLE_LAYER).layers
        assert entry.host_ms == pytest.approx(1.1 / WHOLE_LAYER)
        (entry,) = with_recorded_times(recorded, [recording], WHOLE_LAYER).layers
        assert entry.host_ms == 0

    def test_such_a_step_is_predicted(self) -> None:
        recording = whole(3, forward_ms=2, again_ms=2.5, backward_ms=3.5)
        recorded = built(steps(Script(), [[Layer(i) for i in range(3)]]), whole_layers=True)
        profile = with_recorded_times(recorded, [recording])
        profile = replace(profile, link=Link(1e9, 1e9, 1e9, 1e9))
        plan = whole_layers(profile, 80.0)
        assert plan is not None
        assert simulate(profile, plan).step_ms == pytest.approx(recording.events[-1].at_ms, abs=1e-3)
        assert simulate(profile, plan).recompute_ms == 3 * 2.5

    def test_medians_count(self) -> None:
        recorded = built(steps(Script(), [[Layer(0)]]), whole_layers=True)
        timed = with_recorded_times(recorded, [whole(1, ms, 2 * ms, 3 * ms) for ms in (2, 30, 1)])
        (entry,) = timed.layers
        assert (entry.forward_ms, entry.backward_ms, entry.sections[0].recompute_ms) == (2, 6, 4)

    def test_whole_layers_have_to_fit(self) -> None:
        recorded = built(steps(Script(), [[Layer(0), Layer(1)]]), whole_layers=True)
        plan = whole_layers(recorded, 80.0)
        assert plan is not None
        assert {entry.sections for entry in plan.classes} == {("layer",)}
        least_gib = simulate(recorded, plan).peak_gib + recorded.reserve_gib
        assert whole_layers(recorded, least_gib + 1e-6) == plan
        assert whole_layers(recorded, least_gib - 1e-6) is None


def test_a_layer_whose_saved_tensors_are_all_of_others_has_no_sites() -> None:
    script, saving, other = Script(), Layer(0), PassKey(1, 0)
    saving.forward(script.note(What.STEP))
    script.note(What.FORWARD_BEGIN, pass_key=other).after(3).note(What.FORWARD_END, pass_key=other)
    script.note(What.BACKWARD_BEGIN, pass_key=other).after(5).note(What.BACKWARD_END, pass_key=other)
    saving.backward(script)
    first, second = built(script.note(What.STEP).recording).layers
    assert (first.layers, len(first.sites)) == ((0,), 2)
    assert (second.layers, second.sites, second.forward_ms, second.backward_ms) == ((1,), (), 3, 5)


def test_a_layer_that_was_recomputed_as_a_whole_is_refused() -> None:
    layer = Layer(3)
    layer.inner.site, layer.outer.recompute_inputs = "checkpoint/0", ()
    with pytest.raises(SwapError, match=r"layer 3 was recomputed as a whole, .* recomputes single sites\."):
        built(steps(Script(), [[layer]]))


def test_a_recording_of_nothing_is_refused() -> None:
    script, run = Script().note(What.STEP), PassKey(4, 0)
    script.note(What.FORWARD_BEGIN, pass_key=run).note(What.FORWARD_END, pass_key=run)
    script.note(What.BACKWARD_BEGIN, pass_key=run).note(What.BACKWARD_END, pass_key=run).note(What.STEP)
    with pytest.raises(SwapError, match=r"the saved tensors of no layer were recorded\. Hook all layers"):
        built(script.recording)


@pytest.mark.parametrize(
    ("groups", "needs_of", "expected"),
    [
        # b is made from a, and c from b: it can run neither before nor after both.
        ([({"a", "c"}, {"s"})], {"a": ("x",), "b": ("a",), "c": ("b",)}, [({"a", "b", "c"}, {"s"})]),
        # Two groups that read each other.
        ([({"a", "c"}, {"s"}), ({"b", "d"}, {"t"})], {"b": ("a",), "c": ("d",)}, [({"a", "b", "c", "d"}, {"s", "t"})]),
        # One behind the other.
        ([({"a", "c"}, {"s"}), ({"b"}, {"t"})], {"b": ("a",), "d": ("b",)}, [({"a", "c"}, {"s"}), ({"b"}, {"t"})]),
    ],
)
def test_sites_between_those_of_a_section_belong_to_it(groups: Any, needs_of: Any, expected: Any) -> None:
    assert _without_cycles(groups, needs_of) == expected

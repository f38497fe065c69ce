"""Profiles of handwritten recordings: times without the engine's work, memory besides saved storages."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.swap.common.plan import Infeasible
from megatron.swap.common.types import GIB, MIB, SwapError
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.planner.host_time import WHOLE_LAYER
from megatron.swap.planner.profile import (
    Device,
    LayerClass,
    Link,
    NonLayer,
    NonLayerSite,
    Pipeline,
    Profile,
    Section,
    save_profile,
)
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import empty_plan, solve, whole_layers
from megatron.swap.profiling.profile_builder import build_profile, with_recorded_times
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

    @pytest.mark.parametrize("work", ["wait", "recompute", "trial"])
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


class TestClasses:
    def test_layers_that_are_equal_within_a_percent_are_a_class(self) -> None:
        layers = [Layer(0, is_held=True), Layer(1), Layer(2, scale=1.005), Layer(3, scale=1.5)]
        profile = built(steps(Script(), [layers]))
        assert [entry.layers for entry in profile.layers] == [(0,), (1, 2), (3,)]
        assert [entry.sites[0].is_ineligible for entry in profile.layers] == [True, False, False]
        assert [round(entry.sites[1].mib, 2) for entry in profile.layers] == [30, 30.15, 45]

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

    def test_whole_layers_are_recomputed_from_their_input(self) -> None:
        recording = steps(Script(), [[Layer(0)]])
        assert built(recording).layers[0].sections == ()
        assert built(recording, whole_layers=True).layers[0].sections == (Section("layer", ("out/0",), ("in/0",), 4),)


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

        saved = (
            one("early/0", 8, 1, 30, 31, is_held=True), one("loss/0", 40, 9, 10, 12), one("loss/1", 0.5, 9, 10, 12),
            one("early/0", 9, 40, 60, 61), one("loss/0", 30, 48, 52, 53), one("loss/0", 90, 70),
            one("x/0", 7, 70), one("other/0", 5, 1, 2, 3, chunk=1),
        )  # fmt: skip
        events = steps(Script(), [[Layer(0)]]).events
        plain, named = built(Recording(events), min_mib=1), built(Recording(events, non_layer=saved), min_mib=1)
        assert named.non_layer.sites == (
            NonLayerSite("early/0", 9, 20, "held"), NonLayerSite("loss/0", 40, 1),
            NonLayerSite("loss/1", 0.5, 1, "small"),
        )  # fmt: skip
        assert replace(named, non_layer=replace(named.non_layer, sites=())) == plain

    def test_the_allocator(self) -> None:
        recording = steps(Script(), [[Layer(0)]])
        peak = max(event.peak_bytes for event in recording.events)
        for more, held in ((3 * GIB, 3.0), (-GIB, 0.0)):
            assert built(Recording(recording.events, peak + more)).allocator_gib == held
        assert built(recording).allocator_gib == 0

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
        steps_ms = ((2, 2.5, 3.5), (30, 40, 50), (1, 1, 1))  # medians count
        timed = with_recorded_times(recorded, [whole(2, *ms) for ms in steps_ms])
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


WITHOUT_LAYERS = {
    "a stage of the loss": (Pipeline(2, 1, ((),)), ()),
    "only the head is trained": (Pipeline(1, 0, ((),)), (Layer(0), Layer(1))),
}


@pytest.mark.parametrize("case", WITHOUT_LAYERS)
def test_where_no_layer_runs_backward_the_measured_peak_is_the_only_plan(tmp_path: Path, case: str) -> None:
    """Two micro-batches hold 100 MiB at most, the optimizer 60."""
    pipeline, layers = WITHOUT_LAYERS[case]
    script = Script().note(What.STEP)
    for _ in range(2):
        script.note(What.CHUNK_BEGIN).after(3).use(20)
        for layer in layers:
            script.note(What.FORWARD_BEGIN, pass_key=layer.key).blip(80)
            script.note(What.FORWARD_END, pass_key=layer.key)
        script.note(What.CHUNK_END).after(2).blip(0 if layers else 80).use(-20)
    of = built(script.blip(60).note(What.STEP).recording, 2, pipeline=pipeline, whole_layers=True)
    assert of.layers == ()
    peak_gib = (STATIC + 100 * MIB) / GIB
    assert simulate(of, empty_plan(of)).peak_gib == pytest.approx(peak_gib)
    (plan,) = solve(of, 1.01 * peak_gib).plans
    assert plan.keeps_all
    assert whole_layers(of, 0.99 * peak_gib) is None
    with pytest.raises(Infeasible, match="the smallest budget that was found feasible is"):
        solve(of, 0.99 * peak_gib)
    save_profile(of, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == of

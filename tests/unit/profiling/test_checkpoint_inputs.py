"""Inputs that only a layer that is recomputed whole saves: in profiles, in the simulator and in the solver."""

import pytest

from megatron.swap.common.types import MIB, Action
from megatron.swap.planner.assignment import layer_script
from megatron.swap.planner.profile import Device, LayerClass, Link, Section
from megatron.swap.profiling.profile_builder import build_profile
from megatron.swap.profiling.recording import PassKey, SavedStorage, What
from tests.unit.planner.cases import model, site
from tests.unit.profiling.handwritten import Script

INPUT = "checkpoint/0"


def entry(layers: tuple[int, ...]) -> LayerClass:
    """Layers that save 40 MiB, or their input of 10 MiB."""
    sites = (
        site("norm/0", 20, 0.2, 2.0, 3.0),
        site("mlp/0", 20, 0.8, 1.0, 1.5),
        site(INPUT, 10, 0.0, 0.0, 3.0),
    )  # fmt: skip
    return LayerClass(layers, 1.0, 3.0, sites, (Section("layer", ("norm/0", "mlp/0"), (INPUT,), 1.0),))


def test_a_layer_that_keeps_does_not_hold_its_input() -> None:
    assert [mib for _, mib, _ in layer_script(entry((0,)), {}, ()).saves] == [20, 20]
    assert entry((0,)).saved_mib == 40
    whole = layer_script(entry((0,)), {INPUT: Action.SWAP}, ("layer",)).saves
    assert [(mib, action) for _, mib, action in whole] == [
        (20, Action.RECOMPUTE), (20, Action.RECOMPUTE), (10, Action.SWAP),
    ]  # fmt: skip


@pytest.mark.parametrize("is_held", [False, True])
def test_a_recording_becomes_such_a_site(is_held: bool) -> None:
    script, key = Script(), PassKey(0, 0)
    saved = SavedStorage(key, "norm/0", 30 * MIB)
    inputs = SavedStorage(key, "", 10 * MIB, is_input=True, has_external_refs=is_held)
    script.note(What.STEP).note(What.CHUNK_BEGIN).note(What.FORWARD_BEGIN, pass_key=key).after(2).save(saved)
    script.note(What.FORWARD_END, pass_key=key).note(What.CHUNK_END)
    script.note(What.INPUTS, storage=inputs, num_bytes=inputs.num_bytes)
    script.note(What.BACKWARD_BEGIN, pass_key=key).after(3).note(What.ASKED, storage=saved).free(saved).after(9)
    script.note(What.STEP)  # its input needs no gradient, so that nobody sees the end of its backward
    of = build_profile(
        script.recording, model(), Link(1, 1, 1, 1), Device("made up", 80.0), num_micro_batches=1, source="by hand",
        whole_layers=True,
    )  # fmt: skip
    (found,) = of.layers
    assert found.backward_ms == 3
    assert found.saved_mib == 30
    added = found.sites[-1]
    assert (added.site, added.mib, added.is_unsaved, added.is_ineligible) == (INPUT, 10, True, is_held)
    assert found.sections == (Section("layer", ("norm/0",), (INPUT,), 2),)

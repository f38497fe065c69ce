"""Overlap of the optimizer step: state is loaded and offloaded beside layers, the peak does not rise, and nothing is
stepped twice or before its reload."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.swap.common.types import KIB, MIB
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.optimizer.overlap import StepOverlap
from megatron.swap.optimizer.transfers import StateTransfers
from tests.unit.optimizer.test_state_on_disk import LIMITS
from tests.unit.optimizer.test_stepper import OPTIMIZERS, Training, same

BUCKET_BYTES = 4 * KIB
LAYER_BYTES = 10 * KIB
NUM_LAYERS = 12


class Device(EmulatedDevice):
    """RAM as a device whose memory counts: layers and transfers hold some."""

    def __init__(self) -> None:
        super().__init__(0.002)
        self.layers_bytes = self.peak_of_all = 0
        self.transfers: StateTransfers | None = None

    def allocated_bytes(self) -> int | None:  # type: ignore[override]
        assert self.transfers is not None
        num_bytes = self.layers_bytes + self.transfers.device_bytes
        self.peak_of_all = max(self.peak_of_all, num_bytes)
        return num_bytes


class Model:
    """Layers that hold memory from their forward to their backward, around the steps of ``Training``."""

    def __init__(self, counts_memory: bool = True, name: str = "adamw", disk: DiskFile | None = None) -> None:
        sizes = {"bucket_bytes": 16 * KIB, "limit_bytes": LIMITS["all on disk"]} if disk else {"bucket_bytes": 4 * KIB}
        self.training = Training(OPTIMIZERS[name], lambda _: True, disk=disk, **sizes)  # type: ignore[arg-type]
        stepper, transfers = self.training.stepper, self.training.transfers
        assert stepper is not None
        self.stepper, self.transfers = stepper, transfers
        self.device = Device() if counts_memory else EmulatedDevice(0.002)
        if isinstance(self.device, Device):
            self.device.transfers = transfers
        self.overlap = StepOverlap(self.device, transfers)
        self.overlap.add(stepper)
        stepper._options = replace(stepper._options, measure_room=self.overlap.note_room)
        self.loaded: list[int] = []  # at the end of each backward
        self.left: list[int] = []  # at the end of each step

    def run(self, layers_bytes: int = LAYER_BYTES, num_micro_batches: int = 2, *, steps: bool = True) -> None:
        for number in range(num_micro_batches):
            for _ in range(NUM_LAYERS):
                self.overlap.on_layer_forward(number == 0)
                self._hold(layers_bytes)
            for _ in range(NUM_LAYERS):
                self._hold(-layers_bytes)
                if number == num_micro_batches - 1:
                    self.overlap.on_layer_backward_end()
        self.loaded.append(self.transfers.loaded_bytes)
        if steps:
            self.training.steps(1)
        self.left.append(self.transfers.offloading_bytes)
        self.overlap.step_ended()

    def _hold(self, num_bytes: int) -> None:
        if isinstance(self.device, Device):
            self.device.layers_bytes += num_bytes
            self.device.allocated_bytes()


def alone(num_steps: int, name: str = "adamw") -> list[object]:
    return Training(OPTIMIZERS[name]).steps(num_steps).all()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskFile]:
    made = DiskFile(tmp_path, 64 * MIB)
    yield made
    made.close()


@pytest.mark.parametrize(("name", "counts_memory"), [
    *((name, True) for name in ("adamw", "sgd", "counts")), ("adamw", False),
])  # fmt: skip
def test_as_the_optimizer_alone(name: str, counts_memory: bool) -> None:
    model = Model(counts_memory, name)
    for _ in range(5):
        model.run()
    assert max(model.loaded[1:]) > 0
    assert max(model.left) > 0
    assert same(model.training.all(), alone(5, name))
    model.overlap.is_enabled = False
    model.run()
    assert (model.loaded[-1], model.left[-1]) == (0, 0)


def test_no_peak_rises() -> None:
    model = Model()
    model.device.layers_bytes = LAYER_BYTES  # weights, which are held all the time
    model.run()
    assert (model.loaded, model.left) == ([0], [0])  # nothing was known yet
    before = model.device.peak_of_all
    for _ in range(3):
        model.run()
    assert model.device.peak_of_all == before == (1 + NUM_LAYERS) * LAYER_BYTES
    # All but the last layer, and a bucket that waits to go out.
    room_bytes = (NUM_LAYERS - 1) * LAYER_BYTES
    assert room_bytes - 3 * BUCKET_BYTES < model.loaded[-1] <= room_bytes - BUCKET_BYTES
    assert room_bytes - 2 * BUCKET_BYTES < model.left[-1] <= room_bytes


def test_a_stepper_loads_when_those_before_it_are_loaded() -> None:
    model, asked = Model(), list[int]()
    model.run()
    second = SimpleNamespace(load_ahead=asked.append, is_loaded=False, drop_loaded=lambda: None)
    model.overlap.add(second)  # type: ignore[arg-type]
    for layers_bytes, is_asked in ((LAYER_BYTES, False), (2 * LAYER_BYTES, False), (2 * LAYER_BYTES, True)):
        model.run(layers_bytes)
        assert bool(asked) == is_asked, "the room is that of the step before"


@pytest.mark.parametrize("runs_again", [False, True])
def test_a_step_that_is_skipped_or_a_backward_that_runs_again_leaves_nothing_loaded(runs_again: bool) -> None:
    model = Model()
    model.run()
    if runs_again:
        model.run()
        peak = model.device.peak_of_all
        for _ in range(NUM_LAYERS):
            model.overlap.on_layer_backward_end()
        assert model.transfers.loaded_bytes > 0
    else:
        model.run(steps=False)
        assert model.loaded[-1] > 0
        assert model.transfers.device_bytes == 0
        peak = model.device.peak_of_all
    model.run()
    assert model.device.peak_of_all == peak
    assert same(model.training.all(), alone(3 if runs_again else 2))


def test_the_room_of_a_larger_step_is_not_that_of_the_next_ones_nor_that_of_another_amount() -> None:
    model = Model()
    model.run(2 * LAYER_BYTES)
    for _ in range(2):  # the first one still ends with what the larger step had room for
        model.run(LAYER_BYTES)
    model.device.peak_of_all = 0
    model.run(LAYER_BYTES)
    assert model.loaded[-1] > 0
    assert model.device.peak_of_all == NUM_LAYERS * LAYER_BYTES
    model.overlap.forget_level()  # layers that will hold another amount say first how much
    model.run()
    assert (model.loaded[-1], model.left[-1]) == (0, 0)
    model.run()
    assert model.loaded[-1] > 0


def test_what_is_materialized_is_what_was_stepped_last() -> None:
    """One checkpoint comes right after a step, one when buckets were loaded ahead of the next step."""
    model = Model()
    plain = Training(OPTIMIZERS["adamw"])
    for _ in range(3):
        model.run()
        assert same(model.training.all(), plain.steps(1).all())
    model.run(steps=False)
    for _ in range(NUM_LAYERS):
        model.overlap.on_layer_backward_end()
    model.training.stepper.end_materialize()  # type: ignore[union-attr]
    model.stepper.materialize()
    for training in (model.training, plain):
        for param in training.params:
            param.mul_(0.5)
    model.stepper.store_loaded()
    model.run()
    assert same(model.training.all(), plain.steps(1).all())


def test_the_disk_is_not_waited_for_in_backward(disk: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(disk=disk)
    model.run(100 * KIB)
    monkeypatch.setattr("megatron.swap.memory.staging.Fetched.has_arrived", False)
    model.run(100 * KIB)
    assert model.loaded[-1] == 0
    assert same(model.training.all(), alone(2))

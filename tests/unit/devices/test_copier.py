"""The order of copies of several owners, on a lazy device that logs each wait."""

import torch

from megatron.swap.devices.base import Lane, Owner
from tests.logged_device import logged


def _copy(lane: Lane) -> None:
    lane.begin()
    lane.copy([torch.empty(8, dtype=torch.uint8)], [torch.zeros(8, dtype=torch.uint8)])
    lane.end()


def test_what_is_urgent_goes_first() -> None:
    device = logged()
    weights, activations, state = (device.copier.lane("in", owner) for owner in Owner)
    for lane, name in ((weights, "weights"), (activations, "activations"), (state, "state")):
        lane.stream.name = name
    for lane in (state, weights, activations, state, weights, device.copier.lane("out", Owner.STATE)):
        _copy(lane)
    copy = "copies [8]"
    assert device.log == [
        "state waits for compute@0", f"state {copy}",
        "weights waits for compute@2", f"weights {copy}",
        "activations waits for compute@4", "activations waits for weights@1", f"activations {copy}",
        "state waits for compute@7", "state waits for weights@1", "state waits for activations@1", f"state {copy}",
        "weights waits for compute@11", f"weights {copy}",
        "out waits for compute@13", f"out {copy}",
    ]  # fmt: skip

"""Fixtures of the tests of offloaded weights."""

from collections.abc import Iterator

import pytest
import torch

from megatron.swap.devices.base import Device
from tests.weight_models import DEVICES


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Each kind of device. A lazy one must have seen no race."""
    made = DEVICES[request.param]()
    yield made
    made.close()
    assert getattr(made, "violations", []) == []


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)

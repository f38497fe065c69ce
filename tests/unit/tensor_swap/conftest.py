"""Fixtures of the tests of tensor swapping."""

from collections.abc import Iterator

import pytest

from megatron.swap.tensor_swap.swap import TensorSwap
from tests.unit.tensor_swap.tensor_cases import HOST_GIB, WAYS, OrderlyQueue, begin_copies


@pytest.fixture
def orderly() -> type[OrderlyQueue]:
    """Return a new queue class that lists its queues in ``made``: the queue of offloads first, then that of reloads."""
    return type("Orderly", (OrderlyQueue,), {"made": [], "fails": set()})


@pytest.fixture(params=WAYS)
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorSwap]:
    begin_copies(monkeypatch, request.param)
    with TensorSwap(HOST_GIB, "cpu") as opened:
        yield opened

"""Fixtures for the transfer queue."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.swap.native.transfer_queue import TransferQueue
from tests.unit.native.helpers import HERE, FakeCuda


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", str(HERE / "fake_cuda.cpp"), "-o", str(made)]
    subprocess.run(command, check=True)
    return made


@pytest.fixture
def fake(fake_library: Path) -> Iterator[FakeCuda]:
    cuda = FakeCuda(fake_library)
    cuda.reset()
    yield cuda
    cuda.allow(-1)


@pytest.fixture
def make() -> Iterator[Callable[..., TransferQueue]]:
    """Makes queues, and stops them at the end."""
    made: list[TransferQueue] = []

    def make(num_in_flight: int = 2, cuda: FakeCuda | None = None, started: bool = True) -> TransferQueue:
        queue = TransferQueue("test", num_in_flight, cuda.path if cuda else None)
        if started:
            queue.start()
        made.append(queue)
        return queue

    yield make
    for queue in made:
        queue._core.abandon()

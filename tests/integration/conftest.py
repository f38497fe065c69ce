"""Fixtures of the tests that run the real trainer."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Trainer, Zygote


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs of the trainer are slow, unless they are marked ``short``."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("short"):
            item.add_marker("slow")


@pytest.fixture(scope="session")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "unswapped"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as zygote:
        yield zygote


@pytest.fixture
def trainer(zygote: Zygote, tmp_path: Path, shared_runs: Path) -> Trainer:
    return Trainer(zygote, tmp_path, shared_runs)

"""Fixtures of the tests that run the real trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Trainer, Zygote


@pytest.fixture(scope="session")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all pytest workers of this session."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "unswapped"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks trainers for all tests of this worker."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def trainer(zygote: Zygote, tmp_path: Path, shared_runs: Path) -> Trainer:
    """Runs training. All tests share the runs without swapping."""
    return Trainer(zygote, tmp_path, shared_runs)

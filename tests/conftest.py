"""Which tests run, and what all of them share."""

import gc
import os
from pathlib import Path

import pytest

from tests.sizes import IS_NIGHTLY, IS_SHORT

LEFT_OUT = os.environ.get("SWAP_TESTS_LEFT_OUT")
"""The file that gets what the run leaves out; ``tests/run.sh`` prints it in the end."""


@pytest.hookimpl(trylast=True)  # behind -m "not gpu"
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The nightly run alone has the tests marked ``nightly``. The short run leaves out those marked ``slow``, too."""
    left_out = [
        item for item in items
        if (item.get_closest_marker("nightly") and not IS_NIGHTLY) or (item.get_closest_marker("slow") and IS_SHORT)
    ]  # fmt: skip
    if not left_out:
        return
    config.hook.pytest_deselected(items=left_out)
    ids = set(left_out)
    items[:] = [item for item in items if item not in ids]
    if LEFT_OUT is not None:  # each worker writes the same
        num_training = sum("integration" in item.path.parts for item in left_out)
        counts = f"{num_training} of training runs and programs, {len(left_out) - num_training} unit tests"
        Path(LEFT_OUT).write_text(f"{len(left_out)} tests ({counts}) and the full sizes of the fuzzes")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Collections of garbage in a test need not look at torch and at all that was imported before."""
    gc.collect()
    gc.freeze()

"""What several tests of memory outside the device share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.swap.common.types import MIB
from megatron.swap.memory.disk_file import DiskFile


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskFile]:
    made = DiskFile(tmp_path, 64 * MIB)
    yield made
    made.close()

"""What several tests of the edge to Megatron-LM share."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The process group of a single rank."""
    store = tmp_path_factory.mktemp("group") / "store"
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()

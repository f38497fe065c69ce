"""Device memory that another program takes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.runner.memory_hog import MemoryHogError, memory_hog

HAS_GPU = torch.cuda.is_available()


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU that has them")
def test_where_there_is_not_so_much_nothing_runs() -> None:
    with pytest.raises(MemoryHogError, match=r"1 and 0\.5 GiB of GPU memory are not free: .+"), memory_hog([1, 0.5]):
        pytest.fail("the block ran without it")


@pytest.mark.parametrize("gib", [[], [0, 0]])
def test_nothing_needs_no_gpu(gib: list[float]) -> None:
    with memory_hog(gib):
        pass


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_it_is_taken_so_long_and_no_longer() -> None:
    before_bytes, _ = torch.cuda.mem_get_info()
    with memory_hog([2]):
        assert torch.cuda.mem_get_info()[0] <= before_bytes - 2 * 2**30
    assert torch.cuda.mem_get_info()[0] > before_bytes - 2**30

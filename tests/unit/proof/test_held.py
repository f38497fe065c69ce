"""Device memory that another program holds."""

from __future__ import annotations

import pytest
import torch

from proof.run.held import HeldError, held

HAS_GPU = torch.cuda.is_available()


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU to hold memory of")
def test_where_it_cannot_be_held_nothing_runs() -> None:
    with pytest.raises(HeldError, match=r"1 and 0\.5 GiB of GPU memory cannot be held: .+"), held([1, 0.5]):
        pytest.fail("it was not held")


@pytest.mark.parametrize("gib", [[], [0, 0]])
def test_nothing_needs_no_gpu(gib: list[float]) -> None:
    with held(gib):
        pass


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_it_is_held_so_long_and_no_longer() -> None:
    before_bytes, _ = torch.cuda.mem_get_info()
    with held([2]):
        assert torch.cuda.mem_get_info()[0] <= before_bytes - 2 * 2**30
    assert torch.cuda.mem_get_info()[0] > before_bytes - 2**30

"""Numbers of tokens reach the host by a kernel, not behind the copies of activations."""

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher

from megatron.swap.devices.host_writes import MOST_BYTES, can_write, write_to_host
from megatron.swap.patches import registry
from megatron.swap.patches.token_counts import token_counts_patch

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("is_written", [True, False])
def test_the_dispatcher_takes_what_was_written(is_written: bool) -> None:
    written: list[torch.Tensor] = []

    def write(tensor: torch.Tensor) -> torch.Tensor:
        written.append(tensor)
        return tensor + 1

    counts = torch.tensor([3, 5])
    with registry.apply([token_counts_patch(lambda tensor: is_written and tensor is not None, write)]):
        moved = token_dispatcher.maybe_move_tensor_to_cpu(counts)
        array = token_dispatcher.maybe_move_tensor_to_cpu(counts, as_numpy=True)
        assert token_dispatcher.maybe_move_tensor_to_cpu(None) is None
    assert moved.tolist() == ([4, 6] if is_written else [3, 5])
    # Upstream returns a tensor of the host as it is.
    assert isinstance(array, np.ndarray if is_written else torch.Tensor)
    assert len(written) == 2 * is_written
    assert token_dispatcher.maybe_move_tensor_to_cpu(counts) is counts


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_what_was_written_arrives_before_a_copy_that_was_issued_earlier(device: str) -> None:
    large = torch.zeros(2 << 30, dtype=torch.uint8, device=device)
    host = torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
    numbers = torch.arange(24, device=device).reshape(4, 6)
    cases = [numbers, numbers.t(), numbers[1], numbers.sum(), numbers.int(), numbers[:, ::2]]
    assert all(map(can_write, cases))
    assert not can_write(numbers.float())
    assert not can_write(torch.zeros(MOST_BYTES, dtype=torch.int64, device=device))
    # Kernels are loaded and memory is pinned before the copy begins: either may wait for it.
    first = [write_to_host(case) for case in cases]
    torch.cuda.synchronize()
    del first
    copies, counts = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(copies):
        host.copy_(large, non_blocking=True)
    with torch.cuda.stream(counts):
        written = [write_to_host(case) for case in cases]
    counts.synchronize()
    is_under_way = not copies.query()
    assert [one.tolist() for one in written] == [case.tolist() for case in cases]
    assert [one.shape for one in written] == [case.shape for case in cases]
    assert is_under_way

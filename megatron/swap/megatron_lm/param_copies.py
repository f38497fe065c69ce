"""Copies of parameters in host memory, while the distributed optimizer's buffers are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron.swap.devices.lasting_memory import has_free


@contextmanager
def off_device(params: Sequence[torch.nn.Parameter], num_bytes: int, *, host_bytes: int) -> Iterator[None]:
    """Keep the values of parameters in host memory, if the device lacks ``num_bytes`` beside them.

    Parameters stay if their copies need more than ``host_bytes``: Megatron's own error then names the missing memory.
    The values cross the link twice, unpinned, once a run.
    """
    if not has_free(num_bytes):
        torch.cuda.empty_cache()
    param_bytes = sum(param.numel() * param.element_size() for param in params)
    if has_free(num_bytes) or param_bytes > host_bytes:
        yield
        return
    copies = []
    for param in params:
        copies.append(param.data.cpu())
        # Still a tensor of its device and shape, with one element in memory. A parameter that changes its device would
        # get another gradient accumulator, and those are held (`accumulators.py`).
        param.data = param.data.new_zeros(()).expand(param.shape)
    torch.cuda.empty_cache()  # each buffer is larger than the pieces that this freed
    yield
    for param, values in zip(params, copies, strict=True):
        param.data.copy_(values)

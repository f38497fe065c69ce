"""Room for the buffers that Megatron's distributed optimizer makes beside the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.swap.devices.room import has_room
from megatron.swap.memory.host_memory import available_host_bytes, local_world_size


def make_room(params: Sequence[torch.nn.Parameter], num_bytes: int) -> None:
    """Move parameters to host memory if the device has no room for ``num_bytes`` beside them.

    Megatron copies them from there into its buffer, so the values are the same. It takes two copies over the link, of
    memory that is not pinned, once. Where the host has no room for its ranks' parameters they stay, and Megatron's own
    error says what the device lacks.
    """
    if has_room(num_bytes):
        return
    torch.cuda.empty_cache()
    if has_room(num_bytes):
        return
    param_bytes = sum(param.numel() * param.element_size() for param in params)
    if param_bytes * local_world_size() > available_host_bytes():
        return
    for param in params:
        param.data = param.data.cpu()
    torch.cuda.empty_cache()  # each buffer is larger than the pieces that this freed

"""Pinned buffers between a disk and the device: how many, and how large.

`memory` allocates them, and the planner counts them. No torch, no Megatron.
"""

from __future__ import annotations

from megatron.swap.common.types import MIB

NUM_AHEAD = 3
"""Buffers that are read before they are needed, and as many that are still being written."""
NUM_STAGED = 2 * NUM_AHEAD + 1
"""All buffers: those, and one whose bytes are in use."""
MAX_SPILL_BUFFER_BYTES = 64 * MIB
"""Largest buffer for activations: a few chunks of what a disk takes at once."""


def disk_buffer_bytes(host_bytes: int, max_bytes: int) -> int:
    """Size of one buffer, at most ``max_bytes``, where all buffers are part of ``host_bytes`` of host memory."""
    return max(MIB, min(max_bytes, host_bytes // 16))

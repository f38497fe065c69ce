"""Pinned buffers between a disk and the device: how many, and how large.

`memory` allocates them, and the planner counts them. No torch, no Megatron.
"""

from __future__ import annotations

from megatron.swap.common.types import MIB

NUM_AHEAD = 3
"""Buffers that are read ahead of their use; as many may be waiting to be written."""
NUM_STAGED = 2 * NUM_AHEAD + 1
"""All buffers: those for reads, those for writes, and one whose bytes are in use."""
MAX_SPILL_BUFFER_BYTES = 64 * MIB
"""Largest buffer for activations: a few of the disk's chunks."""


def disk_buffer_bytes(host_bytes: int, max_bytes: int) -> int:
    """Return the bytes of one buffer: a 16th of ``host_bytes``, but at most ``max_bytes``, and at least 1 MiB.

    ``host_bytes`` is the host memory that the buffers are part of.
    """
    return max(MIB, min(max_bytes, host_bytes // 16))

"""Pinned buffers between a disk and the device: how many, and how large. No torch, no Megatron."""

from megatron.swap.common.rounding import round_up
from megatron.swap.common.types import MIB

BLOCK_BYTES = 4096  # offsets, sizes and addresses are multiples of this, which is a multiple of every disk's block size
NUM_AHEAD = 3  # buffers that are read ahead of their use; as many may wait to be written
NUM_STAGED = 2 * NUM_AHEAD + 1  # for reads, for writes, and a buffer whose bytes are in use
MAX_SPILL_BUFFER_BYTES = 64 * MIB  # largest buffer for activations: a few of the disk's chunks


def disk_buffer_bytes(host_bytes: int, max_bytes: int) -> int:
    """Return the bytes of a buffer: a 16th of ``host_bytes`` of host memory, from 1 MiB to ``max_bytes``."""
    return max(MIB, min(max_bytes, host_bytes // 16))


def with_padding(buffer_bytes: int) -> int:
    """Return the size of a buffer for ``buffer_bytes`` in up to 16 spans, each padded to whole blocks."""
    # A slice of a parameter has fewer spans: its main value and its moments.
    return round_up(buffer_bytes, BLOCK_BYTES) + 16 * BLOCK_BYTES


def staging_bytes(buffer_bytes: int) -> int:
    """Return the host memory in bytes of all buffers, each for ``buffer_bytes``."""
    return NUM_STAGED * with_padding(buffer_bytes)

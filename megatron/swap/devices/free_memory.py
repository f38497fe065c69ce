"""Memory of the device outside the allocator's cache."""

from __future__ import annotations

import torch

MARGIN_BYTES = 64 << 20  # the allocator reserves whole segments


def has_free(num_bytes: float) -> bool:
    """Return whether the allocator may reserve ``num_bytes`` more. True without CUDA."""
    if not torch.cuda.is_available():
        return True
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    allowed_bytes = torch.cuda.get_per_process_memory_fraction() * total_bytes - torch.cuda.memory_reserved()
    return min(free_bytes, allowed_bytes) >= num_bytes + MARGIN_BYTES

"""Let Megatron's real trainer run without CUDA, while ``torch.cuda.is_available()`` stays False.

Each file has one group of patches and its reason. Tensors that upstream creates on ``cuda`` are created on the CPU,
streams do nothing, and the CUDA random state is the CPU's.
"""

from __future__ import annotations

from megatron.swap.patches.cpu import (
    current_device,
    data_loader,
    device_arch,
    factories,
    initialize,
    memory_report,
    random_state,
    streams,
    tensor_cuda,
    tensor_type,
    token_counts,
)
from megatron.swap.patches.registry import Patch

CORE_PATCHES: tuple[Patch, ...] = (
    *current_device.PATCHES,
    *factories.PATCHES,
    *tensor_cuda.PATCHES,
    *tensor_type.PATCHES,
    *streams.PATCHES,
    *random_state.PATCHES,
    *token_counts.PATCHES,
)
"""The patches that ``megatron.core`` needs."""
CPU_PATCHES: tuple[Patch, ...] = (
    *CORE_PATCHES,
    *device_arch.PATCHES,
    *initialize.PATCHES,
    *data_loader.PATCHES,
    *memory_report.PATCHES,
)
"""The patches that Megatron's trainer needs."""

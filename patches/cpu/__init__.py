"""Let Megatron's real trainer run without CUDA, ``torch.cuda.is_available()`` staying honestly False.

Each file is one seam with its reason. Tensors that upstream asks for on ``cuda`` are made on the CPU, streams
do nothing, and what upstream calls the CUDA random state *is* the CPU's one.
"""

from __future__ import annotations

from patches.cpu import (
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
from patches.registry import Patch

CPU_PATCHES: tuple[Patch, ...] = (
    *current_device.PATCHES,
    *factories.PATCHES,
    *tensor_cuda.PATCHES,
    *tensor_type.PATCHES,
    *streams.PATCHES,
    *random_state.PATCHES,
    *device_arch.PATCHES,
    *initialize.PATCHES,
    *data_loader.PATCHES,
    *memory_report.PATCHES,
    *token_counts.PATCHES,
)

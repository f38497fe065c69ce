"""Let Megatron's real trainer run without CUDA, while ``torch.cuda.is_available()`` stays False.

Tensors that upstream creates on ``cuda`` are created on the CPU, streams do nothing, and the CUDA random state is the
CPU's.
"""

from __future__ import annotations

from megatron.swap.patches.cpu import data_loader, initialize, megatron_calls, random_state, streams, tensors
from megatron.swap.patches.registry import Patch

CORE_PATCHES: tuple[Patch, ...] = (  # that megatron.core needs
    *tensors.PATCHES, *streams.PATCHES, *random_state.PATCHES, megatron_calls.TOKEN_COUNTS,
)  # fmt: skip
CPU_PATCHES: tuple[Patch, ...] = (  # that Megatron's trainer needs
    *CORE_PATCHES, megatron_calls.DEVICE_ARCH, *initialize.PATCHES, *data_loader.PATCHES, megatron_calls.MEMORY_REPORT,
)  # fmt: skip

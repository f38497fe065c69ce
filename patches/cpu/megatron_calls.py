"""Answer calls of Megatron that ask for a GPU: argument checks, a report of memory, and split sizes of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.patches.registry import Patch

_BLACKWELL = 10  # from this generation on Megatron does not ask for CUDA_DEVICE_MAX_CONNECTIONS


def _device_arch_version(original: Callable[[], int]) -> Callable[[], int]:
    return lambda: _BLACKWELL


def _report_memory(original: Callable[..., Any]) -> Callable[..., None]:
    return lambda name, process_group=None: None


def _maybe_move_tensor_to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


TOKEN_COUNTS = Patch(  # that megatron.core calls
    module="megatron.core.transformer.moe.token_dispatcher",
    attribute="maybe_move_tensor_to_cpu",
    build=_maybe_move_tensor_to_cpu,
    reason="leaves split sizes that are on the CPU already as tensors, which all-to-all refuses",
    sources={"megatron-core 0.18.2": "8fc5847a887d73195b064efc01599f8768a48bbe3327b8fa50f34112cbbf1153"},
)
DEVICE_ARCH = Patch(
    module="megatron.training.arguments",
    attribute="get_device_arch_version",
    build=_device_arch_version,
    reason="asks CUDA for the properties of device 0, which raises; tensor parallelism needs it",
    sources={"megatron-core 0.18.2": "b7e375abfdb1f4f5b5c237090bd1df62a0fdcc1db8326564391c6d38899a09b6"},
)
MEMORY_REPORT = Patch(
    module="megatron.training.training",
    attribute="report_memory",
    build=_report_memory,
    reason="reports zeros, and raises with --log-device-memory-used",
    sources={
        "megatron-core 0.18.2": "19f3ac85868d45a13a7009c7c90fe7bbe3199444ee82b705e316a0ba0cb23628",
        "megatron-core 0.19.0": "ba08bcff29266712da37191bd768d0748769cf94fb6bd27907b39d8e03debd09",
    },
)

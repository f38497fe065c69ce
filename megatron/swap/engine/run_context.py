"""Switches of PyTorch around a run of a layer. Results depend on them, so a second run gets the same values.

Autograd runs a backward outside the ``with`` blocks of its forward. A layer that runs again there would choose another
attention kernel than in forward, or compute in another precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


class Switch(NamedTuple):
    """A setting of PyTorch. Messages show ``name``."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _native(name: str, getter: str, setter: str) -> list[Switch]:
    """Return the switch of two functions of PyTorch, if this version has both."""
    get, put = getattr(torch._C, getter, None), getattr(torch._C, setter, None)
    return [] if get is None or put is None else [Switch(name, get, put)]


def _precisions() -> list[Switch]:
    """Return the switches of the precision of fp32 operations."""
    # From PyTorch 2.9 on, reading the older switches may be an error.
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        return [
            *_native("float32_matmul_precision", "_get_float32_matmul_precision", "_set_float32_matmul_precision"),
            *_native("cuda.matmul.allow_tf32", "_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
            *_native("cudnn.allow_tf32", "_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
        ]
    operations = ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv")
    return [
        Switch(
            f"{backend}.{operation}.fp32_precision",
            partial(torch._C._get_fp32_precision_getter, backend, operation),
            partial(torch._C._set_fp32_precision_setter, backend, operation),
        )
        for backend, operation in operations
    ]


def _deterministic() -> Switch:
    return Switch(
        "deterministic algorithms",
        lambda: (torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()),
        lambda on: torch._C._set_deterministic_algorithms(on[0], warn_only=on[1]),
    )


SWITCHES: tuple[Switch, ...] = (
    *_native("flash attention", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    *_native("flash attention 3", "_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    *_native("memory-efficient attention", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    *_native("attention in single operators", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    *_native("cuDNN's attention", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    *_native("attention of other backends", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    *_native("order of attention kernels", "_get_sdp_priority_order", "_set_sdp_priority_order"),
    *_native(
        "math_sdp_allow_fp16_bf16_reduction",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_set_math_sdp_allow_fp16_bf16_reduction",
    ),
    Switch("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    *_precisions(),
    *_native("cudnn.enabled", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    *_native("cudnn.benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    *_native("cudnn.deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    *_native("mkldnn.enabled", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    _deterministic(),
)


AUTOCAST_DEVICES = ("cuda", "cpu")


class RunContext(NamedTuple):
    """Values of ``SWITCHES``, autocast and default device. Other modes mostly watch, and are not entered again."""

    values: tuple[Any, ...]
    autocast: tuple[tuple[bool, torch.dtype], ...]  # (is on, dtype) for each of AUTOCAST_DEVICES
    caches_casts: bool  # of autocast
    device: torch.device | None  # where tensors are made; None if no context says so

    @classmethod
    def now(cls) -> RunContext:
        """Return the present context. It takes about 5 us."""
        modes = reversed(_get_current_function_mode_stack())
        return cls(
            tuple([switch.get() for switch in SWITCHES]),
            tuple([(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST_DEVICES]),
            torch.is_autocast_cache_enabled(),
            next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context in which this one holds again."""
        now = RunContext.now()
        if now == self:
            yield
            return
        with ExitStack() as undo:
            for switch, before, after in zip(SWITCHES, self.values, now.values, strict=True):
                if before != after:
                    undo.callback(switch.set, after)
                    switch.set(before)
            if (self.autocast, self.caches_casts) != (now.autocast, now.caches_casts):
                for kind, (is_on, dtype) in zip(AUTOCAST_DEVICES, self.autocast, strict=True):
                    if torch.amp.is_autocast_available(kind) and (is_on or torch.is_autocast_enabled(kind)):
                        # Autocast's own context drops its casts of weights, unless another one is around it.
                        undo.enter_context(torch.autocast(kind, dtype, is_on, self.caches_casts))
            if self.device != now.device:
                undo.enter_context(self.device or torch.device("cpu"))
            yield

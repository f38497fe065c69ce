"""Give Megatron's linear layers a kernel that adds weight gradients to ``main_grad``, where apex's is not installed.

Megatron imports ``fused_weight_gradient_mlp_cuda``, which no package of PyPI has, and has no other way to name a
kernel. Without the module it refuses ``--gradient-accumulation-fusion``, which is its default.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from megatron.swap.patches.linear_weight_gradients import PATCH as LINEAR
from megatron.swap.patches.registry import Patch

APEX_MODULE = "fused_weight_gradient_mlp_cuda"
AVAILABLE = "_grad_accum_fusion_available"  # flag in LAYERS: Megatron has found a kernel
LAYERS = "megatron.core.tensor_parallel.layers"
SYMBOL = f"{LAYERS}.{APEX_MODULE}"
FEATURE = "TransformerEngine's kernel for --gradient-accumulation-fusion"


def weight_gradient_kernel_patches(kernel: Any) -> list[Patch]:
    """Make the patches. ``kernel`` has the functions of apex's module that Megatron calls, ``wgrad_gemm_accum_…``."""

    def drain(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def drain_embedding_wgrad_compute(*arguments: Any, **options: Any) -> Any:
            sys.modules[APEX_MODULE] = kernel  # the original imports it
            try:
                return original(*arguments, **options)
            finally:
                del sys.modules[APEX_MODULE]

        return drain_embedding_wgrad_compute

    return [
        Patch(
            module=LAYERS,
            attribute=APEX_MODULE,
            build=lambda original: kernel,
            reason="a module of apex that PyPI does not have; backward of linear layers calls it by name",
            sources=LINEAR.sources,
            feature=FEATURE,
            source_of=LINEAR.attribute,
            may_lack=True,
        ),
        Patch(
            module=LAYERS,
            attribute=AVAILABLE,
            build=lambda original: True,
            reason="without apex's module it is false, and linear layers refuse --gradient-accumulation-fusion",
            sources=LINEAR.sources,
            feature=FEATURE,
            source_of=LINEAR.attribute,
        ),
        Patch(
            module="megatron.core.pipeline_parallel.schedules",
            attribute="drain_embedding_wgrad_compute",
            build=drain,
            reason="imports apex's module when it is called, for --defer-embedding-wgrad-compute",
            sources={"megatron-core 0.18.2": "e1a56bcb36094eb118c708d91aab8e8461b864722379f46af29589026f58a10c"},
            feature=FEATURE,
        ),
    ]

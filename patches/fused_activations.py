"""Watch the calls of Megatron's fused activation functions, so that their outputs can be recomputed.

The MLPs call these functions by name. No submodule computes them, so no hook sees their inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch

HASHES = {  # of each function's source
    "bias_gelu_impl": "18544ac1e3c3c4cbf96ed73a81774857b5b9a0683f773dc75e996c6f5313bcdb",
    "bias_geglu_impl": "e938d2fb24a46ea0c230f172c34944b5c6a63dc69c17c261012ae510a5c1b595",
    "bias_swiglu_impl": "af184648d911461b8ba02bf9b2cb6b41ef770012de17b6722feb40e45e8c4612",
    "weighted_bias_swiglu_impl": "4986d1ef4d0d336b4757050f98ed137889412bb2457f2d4d205a0fa6f879b5e0",
    "weighted_bias_quick_geglu_impl": "7a23f78fb6827f0e2fe3157c679fa735727373c81f3555f950650930c0824727",
    "weighted_squared_relu_impl": "fe2e2a320e75718c049e5dd9c15c1f5d5aee5146b358ee60d42c1293829489e4",
}
# Modules under megatron.core.transformer, and the functions that each of them calls.
CALLERS = {
    "mlp": ("bias_gelu_impl", "bias_geglu_impl", "bias_swiglu_impl", "weighted_bias_swiglu_impl",
            "weighted_bias_quick_geglu_impl"),
    "moe.experts": ("weighted_bias_swiglu_impl", "weighted_bias_quick_geglu_impl", "weighted_squared_relu_impl"),
    "moe.shared_experts": ("bias_gelu_impl", "bias_geglu_impl", "bias_swiglu_impl"),
}  # fmt: skip
Function = Callable[..., Any]


def fused_activations_patches(watched: Callable[[Function], Function]) -> tuple[Patch, ...]:
    """Make the patches. ``watched(function)`` returns the replacement of each function."""
    return tuple(
        Patch(
            module=f"megatron.core.transformer.{module}",
            attribute=name,
            build=lambda original: watched(original),  # of this module, which `Patch.file` names
            reason="a fused activation is a function called by name, so no hook sees its output",
            sources={"megatron-core 0.18.2": HASHES[name]},
            feature="recomputation of fused activations",
        )
        for module, names in CALLERS.items()
        for name in names
    )

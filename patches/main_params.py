"""Copy parameters in 16 bits once, not twice, where Megatron makes single-precision ones of them.

It clones each first, and the clones' memory lies between those that stay for good: holes as large as each layer's
smallest weight (32 MiB at hidden size 4096), all through training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from patches.registry import Patch


class _WithoutClones(TorchFunctionMode):
    """The tensor itself for a clone of it, if it is in 16 bits: ``float``, which is what follows, copies it anyway."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.clone and args[0].dtype in (torch.bfloat16, torch.float16):
            return args[0].detach()
        return function(*args, **(kwargs or {}))


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def without_clones(*arguments: Any, **options: Any) -> Any:
        with _WithoutClones():
            return original(*arguments, **options)

    return without_clones


def _build_static(original: Callable[..., Any]) -> Any:
    return staticmethod(_build(original))  # the class is bound to it already


REASON = "clones each parameter before it copies it in single precision: holes between those that stay"
PATCHES = (
    Patch(
        module="megatron.core.optimizer.optimizer",
        attribute="Float16OptimizerWithFloat16Params.__init__",
        build=_build,
        reason=REASON,
        written_for="megatron-core 0.19.2",
        source_sha256="de5b6824092210272b4cb5ca5a5fc957377012431ce5a1e18003da875545cda9",
    ),
    Patch(
        module="megatron.core.optimizer.distrib_optimizer",
        attribute="DistributedOptimizer._build_model_and_main_param_groups",
        build=_build_static,
        reason=REASON,
        written_for="megatron-core 0.19.2",
        source_sha256="3fce9be2b6d1d143559761811d30afc63d63c6405dbead686f30996997096951",
    ),
)

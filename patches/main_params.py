"""Copy 16-bit parameters once, not twice, where Megatron creates single-precision main parameters, and report each.

Megatron clones each parameter before copying it in single precision. The freed clones leave holes between the main
parameters, all through training, as large as each layer's smallest weight (32 MiB at hidden size 4096). Megatron also
creates all main parameters on the device before any can be offloaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.swap.patches.registry import Patch

OnCreated = Callable[[torch.Tensor], None]
REASON = "clones each parameter before it copies it in single precision, which fragments memory all through training"


class _WithoutClones(TorchFunctionMode):
    """Returns a 16-bit tensor itself instead of its clone, because the call of ``float`` that follows copies it."""

    def __init__(self, on_created: OnCreated | None) -> None:
        super().__init__()
        self._on_created = on_created

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A parameter in 8 bits pretends to be in bf16. Tensors computed from it are cut into shards only afterwards.
        is_plain = bool(args) and type(args[0]) in (torch.Tensor, torch.nn.Parameter)
        is_short = is_plain and args[0].dtype in (torch.bfloat16, torch.float16)
        if function is torch.Tensor.clone and is_short:
            return args[0].detach()
        result = function(*args, **(kwargs or {}))
        if function is torch.Tensor.float and is_short and self._on_created is not None:
            self._on_created(result)
        return result


def _build(original: Callable[..., Any], on_created: OnCreated | None) -> Callable[..., Any]:
    @functools.wraps(original)
    def without_clones(*arguments: Any, **options: Any) -> Any:
        with _WithoutClones(on_created):
            return original(*arguments, **options)

    return without_clones


def main_params_patches(on_created: OnCreated | None = None) -> tuple[Patch, ...]:
    """Make the patches. ``on_created`` is called with each main parameter, before the next is created."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        return _build(original, on_created)

    def build_static(original: Callable[..., Any]) -> Any:
        return staticmethod(_build(original, on_created))  # the class is bound to it already

    feature = "main parameters that are made without clones" if on_created is None else ""

    return (
        Patch(
            module="megatron.core.optimizer.optimizer",
            attribute="Float16OptimizerWithFloat16Params.__init__",
            build=build,
            reason=REASON,
            sources={
                "megatron-core 0.18.2": "1d470dedcf8e2f0ee8cf6e02bef57a96debdbc7bebbad78a52b50001d9b8b839",
                "megatron-core 0.19.0": "de5b6824092210272b4cb5ca5a5fc957377012431ce5a1e18003da875545cda9",
            },
            feature=feature,
        ),
        Patch(
            module="megatron.core.optimizer.distrib_optimizer",
            attribute="DistributedOptimizer._build_model_and_main_param_groups",
            build=build_static,
            reason=REASON,
            sources={
                "megatron-core 0.18.2": "891e288eda54735771011fc6e1c8759b2a51dce0003d5a5a3ab763627f1e754d",
                "megatron-core 0.19.0": "3fce9be2b6d1d143559761811d30afc63d63c6405dbead686f30996997096951",
            },
            feature=feature,
        ),
    )

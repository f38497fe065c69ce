"""Copy parameters in 16 bits once, not twice, where Megatron makes single-precision ones of them.

It clones each first, and the clones' memory lies between those that stay for good: holes as large as each layer's
smallest weight (32 MiB at hidden size 4096), all through training. And it makes all of them on the device before
anybody could take one away.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from patches.registry import Patch

Born = Callable[[torch.Tensor], None]
REASON = "clones each parameter before it copies it in single precision: holes between those that stay"


class _WithoutClones(TorchFunctionMode):
    """The tensor itself for a clone of it, if it is in 16 bits: ``float``, which is what follows, copies it anyway."""

    def __init__(self, on_born: Born | None) -> None:
        super().__init__()
        self._on_born = on_born

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_short = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype in (torch.bfloat16, torch.float16)
        if function is torch.Tensor.clone and is_short:
            return args[0].detach()
        result = function(*args, **(kwargs or {}))
        if function is torch.Tensor.float and is_short and self._on_born is not None:
            self._on_born(result)
        return result


def _build(original: Callable[..., Any], on_born: Born | None) -> Callable[..., Any]:
    @functools.wraps(original)
    def without_clones(*arguments: Any, **options: Any) -> Any:
        with _WithoutClones(on_born):
            return original(*arguments, **options)

    return without_clones


def main_params_patches(on_born: Born | None = None) -> tuple[Patch, ...]:
    """``on_born`` is told of each main parameter as soon as it is there, before the next one is made."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        return _build(original, on_born)

    def build_static(original: Callable[..., Any]) -> Any:
        return staticmethod(_build(original, on_born))  # the class is bound to it already

    return (
        Patch(
            module="megatron.core.optimizer.optimizer",
            attribute="Float16OptimizerWithFloat16Params.__init__",
            build=build,
            reason=REASON,
            written_for="megatron-core 0.19.2",
            source_sha256="de5b6824092210272b4cb5ca5a5fc957377012431ce5a1e18003da875545cda9",
        ),
        Patch(
            module="megatron.core.optimizer.distrib_optimizer",
            attribute="DistributedOptimizer._build_model_and_main_param_groups",
            build=build_static,
            reason=REASON,
            written_for="megatron-core 0.19.2",
            source_sha256="3fce9be2b6d1d143559761811d30afc63d63c6405dbead686f30996997096951",
        ),
    )

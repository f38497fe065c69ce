"""The attributes of a Megatron layer that are compared before it runs again, and how it may run.

Modules of Megatron and TransformerEngine are made to run again. Their attributes are results of the present run (token
dispatchers), or their own checkpoints restore them (scales of 8 bits). Attributes of these modules alone are left out.
The result is compared all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.router import Router
from torch import nn
from torch.overrides import TorchFunctionMode

MADE_TO_RUN_AGAIN = ("megatron", "transformer_engine")
# Attributes that every module has, `training` and the hooks among them, and an overridden `forward`.
OF_ALL_MODULES = frozenset(vars(nn.Module())) | {"forward"}


def attributes_read(module: nn.Module) -> Collection[str] | None:
    """Return the attributes of ``module`` that are compared, or None for all."""
    if not _is_of(module, *MADE_TO_RUN_AGAIN):
        return None
    # A router counts tokens in the run that has gradients, which is the second one.
    return OF_ALL_MODULES - {"_buffers"} if isinstance(module, Router) else OF_ALL_MODULES


def forked_random_states(config: Any) -> Callable[[], AbstractContextManager[None]] | None:
    """Return a function whose context restores random states at its end, or None if a layer runs again only once."""
    fork: Callable[[], AbstractContextManager[None]] | None = getattr(random, "_fork_rng", None)
    # TransformerEngine's checkpoint gives the scales of a forward to one run.
    return None if config.fp8 or config.fp4 else fork


def may_have_gradients(layer: nn.Module) -> bool:
    """Return whether gradients change nothing in the layer's forward, except that tensors are saved."""
    # Routers and the losses of sparse attention (`dsa.py`) count in a forward with gradients. In 8 bits scales depend
    # on them.
    config: Any = layer.config
    if config.fp8 or config.fp4 or getattr(config, "quant_recipe", None) is not None:
        return False
    if getattr(config, "experimental_attention_variant", None) == "dsa":
        return False
    return not any(isinstance(one, Router) for one in layer.modules())


def is_well_known(layer: nn.Module) -> bool:
    """Return whether no module of the layer is the user's own, which may count, too."""
    return all(_is_of(module, "torch", *MADE_TO_RUN_AGAIN) for module in layer.modules())


class _SortedTopK(TorchFunctionMode):
    """Lets ``torch.topk`` sort. Megatron's router asks for it only in a forward with gradients (``moe_utils.py``)."""

    # Scores of more than two experts are summed in the order of `topk`. Unsorted, a layer that runs again would give
    # other bits than in forward, and than in a run without recomputation.
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **{**(kwargs or {}), **({"sorted": True} if function is torch.topk else {})})


def first_run(layer: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function whose context lets a forward without gradients compute the same as with gradients."""
    config: Any = layer.config
    # A checkpoint of Megatron's around the experts has no gradients either way.
    is_inside = config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    has_router = any(isinstance(one, Router) for one in layer.modules())
    return _SortedTopK if has_router and not is_inside else nullcontext


def _is_of(module: nn.Module, *packages: str) -> bool:
    return type(module).__module__.partition(".")[0] in packages

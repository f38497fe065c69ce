"""The attributes of a Megatron layer that are compared before it runs again, and how it may run.

Modules of Megatron and TransformerEngine are made to run again: their attributes are results of the present run (token
dispatchers), or what their own checkpoints restore (scales of 8 bits). Of them, and of no others, attributes are left
out. The result is compared all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.router import Router
from torch import nn

OF_ALL_MODULES = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes that every module has, ``training`` and the hooks among them, and a ``forward`` that was overridden."""


def attributes_read(module: nn.Module) -> Collection[str] | None:
    """Return the attributes of ``module`` that are compared; ``None``: all."""
    if type(module).__module__.partition(".")[0] not in ("megatron", "transformer_engine"):
        return None
    # A router counts tokens in the run that has gradients, which is the second one.
    return OF_ALL_MODULES - {"_buffers"} if isinstance(module, Router) else OF_ALL_MODULES


def forked_random_states(config: Any) -> Callable[[], AbstractContextManager[None]] | None:
    """Return what makes a context behind which random states are as before it; ``None``: a layer runs again only once.

    TransformerEngine's checkpoint gives the scales of a forward to one run.
    """
    fork: Callable[[], AbstractContextManager[None]] | None = getattr(random, "_fork_rng", None)
    return None if config.fp8 or config.fp4 else fork


def may_have_gradients(layer: nn.Module) -> bool:
    """Return whether the layer does nothing else with gradients than without, but save tensors.

    Routers and the losses of sparse attention (``dsa.py``) count in a forward with gradients. In 8 bits, scales depend
    on them.
    """
    config: Any = layer.config
    if config.fp8 or config.fp4 or getattr(config, "experimental_attention_variant", None) == "dsa":
        return False
    return not any(isinstance(module, Router) for module in layer.modules())

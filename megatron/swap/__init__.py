"""Megatron Swap: saved activations leave the GPU between forward and backward, and come back in time.

The public names are loaded when they are first asked for: the planner runs on machines without torch.

======================  =====================================================================================
``add_swap_args``       Megatron's ``extra_args_provider``: adds the ``--swap-…`` flags
``pretrain``            Megatron's ``pretrain`` of a GPT with swapping: one call for every version of Megatron
``install``             a Megatron model that exists, in any training loop: a ``BuiltSwap``, whose ``stats()`` are
                        ``BuiltStats``
``SwapSession``         one training run of Megatron's trainer: ``SwapSession.install(args, model_config)``
``activations``         any PyTorch model while it trains: ``SwappedActivations``, or within a budget
                        ``PlannedActivations``, whose ``stats()`` are ``SwapStats``
``weights``             any PyTorch model while it infers, or trains adapters: a ``WeightSwap``
``TensorSwap``          tensor by tensor
``stash``               what an autograd function keeps on its context, as saved tensors
``Policy``              base of policies, which ``activations`` takes in place of layer numbers
``SwapError``           base of the errors that this package raises on purpose
======================  =====================================================================================
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.swap.common.types import SwapError
    from megatron.swap.engine.policy import Policy
    from megatron.swap.engine.stash import Stash, stash
    from megatron.swap.params.module_weights import WeightStats, WeightSwap, weights
    from megatron.swap.run.built import BuiltStats, BuiltSwap, install
    from megatron.swap.run.module_activations import activations
    from megatron.swap.run.planned_activations import PlannedActivations
    from megatron.swap.run.swapped_activations import SwappedActivations, SwapStats
    from megatron.swap.tensor_swap.swap import TensorStats, TensorSwap
    from megatron.swap.trainer.command_line import add_swap_args
    from megatron.swap.trainer.pretraining import pretrain
    from megatron.swap.trainer.session import SwapSession

__all__ = [
    "BuiltStats",
    "BuiltSwap",
    "PlannedActivations",
    "Policy",
    "Stash",
    "SwapError",
    "SwapSession",
    "SwapStats",
    "SwappedActivations",
    "TensorStats",
    "TensorSwap",
    "WeightStats",
    "WeightSwap",
    "activations",
    "add_swap_args",
    "install",
    "pretrain",
    "stash",
    "weights",
]

_MODULES = {
    "BuiltStats": "run.built",
    "BuiltSwap": "run.built",
    "PlannedActivations": "run.planned_activations",
    "Policy": "engine.policy",
    "Stash": "engine.stash",
    "SwapError": "common.types",
    "SwapSession": "trainer.session",
    "SwapStats": "run.swapped_activations",
    "SwappedActivations": "run.swapped_activations",
    "TensorStats": "tensor_swap.swap",
    "TensorSwap": "tensor_swap.swap",
    "WeightStats": "params.module_weights",
    "WeightSwap": "params.module_weights",
    "activations": "run.module_activations",
    "add_swap_args": "trainer.command_line",
    "install": "run.built",
    "pretrain": "trainer.pretraining",
    "stash": "engine.stash",
    "weights": "params.module_weights",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Megatron Swap: saved activations leave the GPU between forward and backward, and come back in time.

The public names are loaded when they are first asked for: the planner runs on machines without torch.

======================  =====================================================================================
``train``               any model, Megatron's too, in any training loop: a ``Run``, whose ``stats()`` are ``Stats``
``add_swap_args``       Megatron's ``extra_args_provider``: adds the ``--swap-…`` flags
``pretrain``            Megatron's ``pretrain`` of a GPT with swapping: one call for every version of Megatron
``SwapSession``         one training run of Megatron's trainer: ``SwapSession.install(args, model_config)``
``install``             ``train`` of a Megatron model, with further settings in a mapping
``activations``         ``train`` of any other PyTorch model, or of layers of it, with arguments of its own
``weights``             any PyTorch model while it infers, or trains adapters: a ``WeightSwap``
``TensorSwap``          tensor by tensor
``stash``               what an autograd function keeps on its context, as saved tensors
``Policy``              base of policies, which ``train`` takes in place of layer numbers
``SwapError``           base of ``UsageError``, ``Infeasible``, ``HostMemoryError``, ``DiskError``, ``VerifyError``
======================  =====================================================================================

``BuiltSwap``, ``SwappedActivations`` and ``PlannedActivations`` are older names of ``Run``, ``BuiltStats`` and
``SwapStats`` of ``Stats``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.swap.common.plan import Infeasible
    from megatron.swap.common.types import SwapError, UsageError
    from megatron.swap.engine.checksum import VerifyError
    from megatron.swap.engine.policy import Policy
    from megatron.swap.engine.stash import Stash, stash
    from megatron.swap.memory.disk_file import DiskError
    from megatron.swap.memory.host_memory import HostMemoryError
    from megatron.swap.params.module_weights import WeightStats, WeightSwap, weights
    from megatron.swap.run.install import install
    from megatron.swap.run.run import Run
    from megatron.swap.run.run import Run as BuiltSwap
    from megatron.swap.run.run import Run as PlannedActivations
    from megatron.swap.run.run import Run as SwappedActivations
    from megatron.swap.run.stats import Stats
    from megatron.swap.run.stats import Stats as BuiltStats
    from megatron.swap.run.stats import Stats as SwapStats
    from megatron.swap.run.train import activations, train
    from megatron.swap.tensor_swap.swap import TensorStats, TensorSwap
    from megatron.swap.trainer.command_line import add_swap_args
    from megatron.swap.trainer.pretraining import pretrain
    from megatron.swap.trainer.session import SwapSession

__all__ = [
    "BuiltStats", "BuiltSwap", "DiskError", "HostMemoryError", "Infeasible", "PlannedActivations", "Policy",
    "Run", "Stash", "Stats", "SwapError", "SwapSession", "SwapStats", "SwappedActivations", "TensorStats",
    "TensorSwap", "UsageError", "VerifyError", "WeightStats", "WeightSwap", "activations", "add_swap_args", "install",
    "pretrain", "stash", "train", "weights",
]  # fmt: skip

_MODULES = {
    "DiskError": "memory.disk_file", "HostMemoryError": "memory.host_memory", "Infeasible": "common.plan",
    "Policy": "engine.policy", "Run": "run.run", "Stash": "engine.stash",
    "Stats": "run.stats", "SwapError": "common.types", "SwapSession": "trainer.session",
    "TensorStats": "tensor_swap.swap", "TensorSwap": "tensor_swap.swap", "UsageError": "common.types",
    "VerifyError": "engine.checksum", "WeightStats": "params.module_weights", "WeightSwap": "params.module_weights",
    "activations": "run.train", "add_swap_args": "trainer.command_line", "install": "run.install",
    "pretrain": "trainer.pretraining", "stash": "engine.stash", "train": "run.train",
    "weights": "params.module_weights",
}  # fmt: skip
_OLDER_NAMES = {
    "BuiltStats": "Stats", "BuiltSwap": "Run", "PlannedActivations": "Run", "SwapStats": "Stats",
    "SwappedActivations": "Run",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    name = _OLDER_NAMES.get(name, name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The kernel of ``--gradient-accumulation-fusion``: one matrix product adds a weight's gradient to ``main_grad``.

Megatron's own linear layers, the output layer of every GPT among them, take it from apex alone. TransformerEngine has a
matrix product that does the same, with which its own linear layers fuse. It stands in where apex's is missing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

TE_MODULE = "transformer_engine.pytorch.cpp_extensions"
TE_OPTIONS = {"layout": "NT", "grad": True, "accumulate": True, "use_split_accumulator": True}
"""Options of ``general_gemm`` with which TransformerEngine's own linear layers add to ``main_grad``."""
FLAG = "--gradient-accumulation-fusion"
REMEDY = f"Add --no-{FLAG.removeprefix('--')}, or install TransformerEngine."


class TransformerEngineKernel:
    """The functions of apex's ``fused_weight_gradient_mlp_cuda`` that Megatron calls, by TransformerEngine.

    Args:
        general_gemm: TransformerEngine's matrix product.
    """

    def __init__(self, general_gemm: Callable[..., Any]) -> None:
        self._general_gemm = general_gemm

    def wgrad_gemm_accum_fp32(
        self, inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        """Add ``grad_output.T @ inputs`` to ``main_grad``, rounded once, to its type.

        Args:
            inputs: tokens × input features; more dimensions than two are tokens too.
            grad_output: tokens × output features.
            main_grad: output features × input features; contiguous.
        """
        # general_gemm reads its inputs as contiguous without looking.
        inputs, grad_output = (given.contiguous().view(-1, given.shape[-1]) for given in (inputs, grad_output))
        if inputs.dtype == torch.float32 == main_grad.dtype:
            # general_gemm would round the factors to TF32, which torch does only on request.
            main_grad.addmm_(grad_output.t(), inputs)
            return
        self._general_gemm(inputs, grad_output, out=main_grad, out_dtype=main_grad.dtype, **TE_OPTIONS)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
    """Megatron's call for a ``main_grad`` of 16 bits."""


def te_kernel() -> TransformerEngineKernel | None:
    """Return TransformerEngine's kernel; ``None``: it cannot be imported, or takes other arguments."""
    try:
        general_gemm = importlib.import_module(TE_MODULE).general_gemm
        inspect.signature(general_gemm).bind(None, None, out=None, out_dtype=None, **TE_OPTIONS)
    except Exception:  # a broken installation raises anything
        return None
    return TransformerEngineKernel(general_gemm)


def has_kernel() -> bool:
    """Return whether Megatron's linear layers have a kernel: apex's, or one that a patch has given them."""
    return bool(layers._grad_accum_fusion_available)


def kernel_name() -> str | None:
    """Return whose kernel training in this environment will use; ``None``: it has none."""
    if has_kernel():
        return "apex"
    return None if te_kernel() is None else "TransformerEngine"


def lacks_kernel() -> str:
    """Return what to do without a kernel."""
    return f"{FLAG} (Megatron's default) needs TransformerEngine or apex, and neither has its kernel here. {REMEDY}"

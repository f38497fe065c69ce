"""The kernel of ``--gradient-accumulation-fusion``: one matrix product adds a weight's gradient to ``main_grad``.

Megatron's own linear layers, the output layer of every GPT among them, take it from apex alone. TransformerEngine's
linear layers fuse with a matrix product of its own, which stands in where apex's is missing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

TE_MODULE = "transformer_engine.pytorch.cpp_extensions"
# Options of `general_gemm` with which TransformerEngine's own linear layers add to `main_grad`.
TE_OPTIONS = {"layout": "NT", "grad": True, "accumulate": True, "use_split_accumulator": True}
FLAG = "--gradient-accumulation-fusion"
REMEDY = f"Add --no-{FLAG.removeprefix('--')}, or install TransformerEngine."


class TransformerEngineKernel:
    """The functions of apex's ``fused_weight_gradient_mlp_cuda`` that Megatron calls, by TransformerEngine's."""

    def __init__(self, general_gemm: Callable[..., Any]) -> None:
        self._general_gemm = general_gemm

    def wgrad_gemm_accum_fp32(
        self, inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        """Add ``grad_output.T @ inputs`` to ``main_grad`` (output features × input features, contiguous).

        ``inputs`` are tokens × input features, ``grad_output`` tokens × output features; more dimensions are tokens,
        too.
        """
        # general_gemm reads its inputs as contiguous without looking.
        inputs, grad_output = (given.contiguous().view(-1, given.shape[-1]) for given in (inputs, grad_output))
        if inputs.dtype == torch.float32 == main_grad.dtype:
            # general_gemm would round the factors to TF32, which torch does only on request.
            main_grad.addmm_(grad_output.t(), inputs)
            return
        # A sum in single precision is rounded once. A sum in 16 bits may be rounded more often, as in torch: cuBLAS
        # splits products, and adds the parts in the type of the sum.
        self._general_gemm(inputs, grad_output, out=main_grad, out_dtype=main_grad.dtype, **TE_OPTIONS)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32  # Megatron's call for 16 bits.


class WeightGradient:
    """The gradient of an output layer's weight, as a sum over chunks of the tokens.

    A single chunk (``is_whole``) gives the gradient of Megatron's linear layer, to the bit. ``is_fused``: the layer
    adds to ``main_grad`` itself.
    """

    def __init__(self, weight: Any, *, is_fused: bool, is_whole: bool) -> None:
        self._weight = weight
        self._is_fused = is_fused
        # Products of several chunks are added in single precision, so that the sum is rounded once, as a whole
        # product's is. The sum is Megatron's `main_grad` if it has single precision and the layer fuses, or a buffer.
        self._sum: torch.Tensor | None = None
        if is_fused and (is_whole or weight.main_grad.dtype == torch.float32):
            self._sum = weight.main_grad
        elif not is_whole:
            self._sum = torch.zeros_like(weight, dtype=torch.float32)
        self._product: torch.Tensor | None = None

    def add(self, inputs: torch.Tensor, grad_output: torch.Tensor) -> None:
        """Add the product of a chunk: tokens × width, tokens × vocabulary of this rank. More dimensions are tokens."""
        inputs, grad_output = (given.reshape(-1, given.shape[-1]) for given in (inputs, grad_output))
        if self._sum is None:
            self._product = grad_output.t().matmul(inputs)
        elif self._is_fused:
            kernel = layers.fused_weight_gradient_mlp_cuda
            in_single = self._sum.dtype == torch.float32
            (kernel.wgrad_gemm_accum_fp32 if in_single else kernel.wgrad_gemm_accum_fp16)(
                inputs, grad_output, self._sum
            )
        elif inputs.is_cuda and inputs.dtype != torch.float32:
            torch.addmm(self._sum, grad_output.t(), inputs, out_dtype=torch.float32, out=self._sum)
        else:
            self._sum.addmm_(grad_output.t().float(), inputs.float())

    def result(self) -> torch.Tensor | None:
        """Return the gradient for autograd, or the substitute that Megatron's wrapper expects if it was added."""
        if not self._is_fused:
            return self._product if self._sum is None else self._sum.to(self._weight.dtype)
        main_grad: torch.Tensor = self._weight.main_grad
        if self._sum is not main_grad:
            assert self._sum is not None
            main_grad.add_(self._sum)
        if not hasattr(self._weight, "grad_added_to_main_grad"):
            return None
        # The wrapper's hook runs when autograd has a gradient: any, or zeros where others are added to it.
        self._weight.grad_added_to_main_grad = True
        shape, zero = list(main_grad.shape), bool(getattr(self._weight, "zero_out_wgrad", False))
        if layers.HAVE_TE:
            return layers.get_dummy_wgrad(shape, self._weight.dtype, **({"zero": True} if zero else {}))
        return (torch.zeros if zero else torch.empty)(shape, dtype=self._weight.dtype, device=main_grad.device)


def te_kernel() -> TransformerEngineKernel | None:
    """Return TransformerEngine's kernel, or None if it cannot be imported or takes other arguments."""
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
    """Return whose kernel training in this environment will use, or None."""
    if has_kernel():
        return "apex"
    return None if te_kernel() is None else "TransformerEngine"


def lacks_kernel() -> str:
    """Return the remedy for a missing kernel."""
    return f"{FLAG} (Megatron's default) needs TransformerEngine or apex, and neither has its kernel here. {REMEDY}"

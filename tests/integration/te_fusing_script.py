"""The trainer on a machine with a stand-in for TransformerEngine's matrix product, and without apex."""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType

import torch

import pretrain_gpt_swap as program

counts: Counter[torch.dtype] = Counter()
"""Number of additions, by the type of ``main_grad``."""


def general_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> tuple[torch.Tensor, None, None, None]:
    """The one product of TransformerEngine's that linear layers need: ``B.T @ A`` is added to ``out``."""
    assert layout == "NT"
    assert grad
    assert accumulate
    assert out is not None
    assert out_dtype is out.dtype
    assert A.dim() == B.dim() == 2
    assert A.is_contiguous()
    assert B.is_contiguous()
    assert out.is_contiguous()
    counts[out.dtype] += 1
    return out.add_(B.t().matmul(A)), None, None, None


if __name__ == "__main__":
    program.prepare(sys.argv)
    from megatron.core.tensor_parallel import layers  # before there is a TransformerEngine for Megatron to find

    assert not layers._grad_accum_fusion_available
    module = ModuleType("transformer_engine.pytorch.cpp_extensions")
    module.general_gemm = general_gemm  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    program.main()
    for dtype, number in counts.items():
        print(f"weight gradients added: {number} ({dtype})", flush=True)

"""Autocast of the dry run: the types that autocast gives on CUDA, in forward and where backward recomputes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron.swap.dry.autocast import DryAutocast

FP32, BF16 = torch.float32, torch.bfloat16


def made(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(4, 4, dtype=dtype, device="meta", requires_grad=True)


TYPES: tuple[tuple[Any, torch.dtype | None], ...] = (
    (lambda x: x @ x, BF16),
    (lambda x: functional.linear(x, x, x[0]), BF16),
    (lambda x: torch.addmm(x, x, x), BF16),
    (lambda x: torch.bmm(x[None], x[None]), BF16),
    (lambda x: torch.einsum("ij,jk->ik", x, x), BF16),
    (lambda x: x.softmax(-1), FP32),
    (lambda x: functional.layer_norm(x, (4,)), FP32),
    (lambda x: x.pow(2), FP32),
    (lambda x: x.sum(), FP32),
    (lambda x: functional.cross_entropy(x, torch.empty(4, dtype=torch.long, device="meta")), FP32),
    (lambda x: x + x, None),
    (functional.silu, None),
)


def test_types() -> None:
    autocast = DryAutocast()
    for given in (FP32, BF16, FP32):  # every step enters it again
        with autocast.entered(), autocast.forward():
            for function, dtype in TYPES:
                assert function(made(given)).dtype == (dtype or given)
    assert (made(FP32) @ made(FP32)).dtype == FP32


@pytest.mark.parametrize(("has_cache", "num_casts"), [(True, 1), (False, 2)])
def test_a_weight_is_cast_once_in_forward_by_the_cache(has_cache: bool, num_casts: int) -> None:
    autocast, weight = DryAutocast(), made(FP32)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage()._cdata)
        return tensor

    with autocast.entered(), autocast.forward(), torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        inputs = made(BF16)
        torch.set_autocast_cache_enabled(has_cache)
        try:
            functional.linear(functional.linear(inputs, weight), weight)
        finally:
            torch.set_autocast_cache_enabled(True)
    assert len(kept) == 4
    assert len(set(kept)) == 2 + num_casts  # the input, the output of the first, and casts


def test_a_recomputation_in_backward_is_cast_too() -> None:
    autocast, weight, seen = DryAutocast(), made(FP32), []

    def part(inputs: torch.Tensor) -> torch.Tensor:
        result = functional.linear(inputs, weight)
        seen.append(result.dtype)
        return result.pow(2)  # which saves it, so that all of this runs again

    with autocast.entered():
        with autocast.forward():
            loss = checkpoint(part, made(FP32), use_reentrant=False).sum()
        loss.backward()
        assert (weight.detach() @ weight.detach()).dtype == FP32  # outside forward nothing is cast
    assert seen == [BF16, BF16]
    assert weight.grad is not None
    assert weight.grad.dtype == FP32

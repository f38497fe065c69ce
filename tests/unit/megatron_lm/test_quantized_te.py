"""The same with TransformerEngine's own classes, where it is installed: wrappers on any machine, kernels on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.swap.engine.wrapper_tensors import apart
from megatron.swap.megatron_lm.quantized import VALUES, private_copy, wrapper_rules
from megatron.swap.profiling.saved_tensor_hooks import Hooks

te = pytest.importorskip("transformer_engine.pytorch")

from transformer_engine.pytorch.constants import DType  # noqa: E402
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer  # noqa: E402
from transformer_engine.pytorch.tensor.float8_tensor import (  # noqa: E402
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def a_tensor() -> Any:
    data = torch.randint(0, 255, (32, 64), dtype=torch.uint8, device=DEVICE)
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, DEVICE)
    return Float8Tensor(
        shape=(32, 64), dtype=torch.bfloat16, data=data, fp8_scale_inv=torch.ones(1, device=DEVICE),
        fp8_dtype=DType.kFloat8E4M3, data_transpose=data.t().contiguous(), quantizer=quantizer, device=DEVICE,
    )  # fmt: skip


def test_a_wrapper_is_rebuilt_as_it_was() -> None:
    rules, tensor = wrapper_rules(), a_tensor()
    assert rules is not None
    parts = rules.take_apart(tensor, ())
    assert parts is not None
    assert set(parts.inner) == {"_data", "_transpose", "_scale_inv"}
    assert rules.caches(tensor) == ("_transpose",)
    again = parts.kind.__tensor_unflatten__(
        {name: inner.clone() for name, inner in parts.inner.items()}, parts.context, parts.shape, parts.stride
    )
    assert type(again) is Float8Tensor
    assert (again.shape, again.dtype, again._fp8_dtype) == (tensor.shape, tensor.dtype, tensor._fp8_dtype)
    assert again._transpose_invalid == tensor._transpose_invalid
    assert all(torch.equal(getattr(again, name), inner) for name, inner in parts.inner.items())


def test_an_outdated_transpose_stays_outdated() -> None:
    tensor = a_tensor()
    tensor._transpose_invalid = True
    parts = wrapper_rules().take_apart(tensor, ())  # type: ignore[union-attr]
    again = parts.kind.__tensor_unflatten__(parts.inner, parts.context, parts.shape, parts.stride)
    assert again._transpose_invalid


def test_parameters_and_cached_weights_stay_whole() -> None:
    rules, tensor = wrapper_rules(), a_tensor()
    assert rules is not None
    assert rules.take_apart(torch.nn.Parameter(tensor), ()) is None
    assert rules.take_apart(tensor, [torch.Size([32, 64])]) is None


class _Quantized(torch.autograd.Function):
    """Returns a wrapper, and saves it too, as attention in 8 bits does with its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        tensor = a_tensor()
        ctx.save_for_backward(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (tensor,) = ctx.saved_tensors
        assert type(tensor) is Float8Tensor
        return grad * tensor._data.float()


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        ctx.save_for_backward(tensor)
        return tensor._data.float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (tensor,) = ctx.saved_tensors
        assert type(tensor) is Float8Tensor
        return grad * tensor._data.float()


def test_a_wrapper_in_the_middle_of_a_graph() -> None:
    rules, hooks = wrapper_rules(), Hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    assert rules is not None
    grads = []
    for taken_apart in (False, True):
        torch.manual_seed(1)
        x = torch.rand(32, 64, device=DEVICE, requires_grad=True)
        around = apart(rules, hooks, hooks, ()) if taken_apart else Hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.autograd.graph.saved_tensors_hooks(around.pack, around.unpack):
            result = _Read.apply(_Quantized.apply(x))
        result.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def quantizers() -> dict[str, Any]:
    scale = torch.full((1,), 3.0, device=DEVICE)
    return {
        "delayed": Float8Quantizer(scale, torch.zeros(1, device=DEVICE), DType.kFloat8E4M3),
        "tensorwise": Float8CurrentScalingQuantizer(DType.kFloat8E4M3, DEVICE),
        "blockwise": Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True),
    }


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_every_recipe_has_a_private_copy(recipe: str) -> None:
    quantizer = quantizers()[recipe]
    copy = private_copy(quantizer)
    assert type(copy) is type(quantizer)
    assert copy is not quantizer
    if recipe == "delayed":
        quantizer.scale.fill_(5.0)
        assert copy.scale.item() == 3.0
        assert copy.amax.data_ptr() != quantizer.amax.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_a_private_copy_gives_the_same_bytes_and_no_history(recipe: str) -> None:
    quantizer = quantizers()[recipe]
    tensor = torch.randn(256, 512, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        first, copy = quantizer(tensor), private_copy(quantizer)
        if recipe == "delayed":
            seen = quantizer.amax.clone()
            quantizer.scale.fill_(7.0)
            quantizer.amax.zero_()
        again = copy(tensor)
    for name in VALUES:
        values = getattr(first, name, None)
        if values is not None:
            assert torch.equal(values, getattr(again, name)), name
            assert values.storage_offset() == 0, "a view of a larger storage is not recorded"
            assert values.untyped_storage().nbytes() == values.numel()
    if recipe == "delayed":
        assert seen.item() > 0
        assert quantizer.amax.item() == 0

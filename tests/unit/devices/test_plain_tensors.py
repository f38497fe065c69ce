"""Which tensors have their bytes in their storage."""

from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from megatron.swap.devices.plain_tensors import is_plain


def emptied() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@torch.inference_mode()
def inference() -> torch.Tensor:
    return torch.ones(3)


PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "a view": lambda: torch.ones(4, 4).t()[1:],
    "without elements": lambda: torch.empty(0, 4),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "a conjugate": lambda: torch.ones(3, dtype=torch.cfloat).conj(),
    "emptied by its owner": emptied,
    "on the meta device": lambda: torch.ones(3, device="meta"),
}
OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "MKL-DNN's": lambda: torch.ones(3).to_mkldnn(),
    "nested": lambda: torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor_from_jagged(torch.ones(5, 2), torch.tensor([0, 2, 5])),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "named": lambda: torch.ones(3, names=("row",)),
    "zero": lambda: torch._efficientzerotensor(3),
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "a subclass": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
    "inference": inference,
}


@pytest.mark.parametrize("kind", [*PLAIN, *OTHERS])
def test_kinds(kind: str) -> None:
    assert is_plain((PLAIN | OTHERS)[kind]()) is (kind in PLAIN)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.functionalize, torch.func.grad])
def test_tensors_inside_a_transform(transform: Callable[..., Callable[..., object]]) -> None:
    seen = []

    def function(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(is_plain(tensor))
        return tensor.sum()

    transform(function)(torch.ones(3))
    assert seen == [False]

"""What lasts does not divide the memory that activations free."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.devices.lasting_memory import lasting_memory
from megatron.swap.patches import registry
from megatron.swap.patches.te_quantize import te_quantize_patch

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MODULE = "transformer_engine.pytorch.quantized_tensor"
MIB = 1 << 20


class Quantizer:
    """As much of TransformerEngine's quantizer as the patch looks at."""

    def __init__(self, internal: bool) -> None:
        self.internal = internal

    def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: Any = None) -> tuple[torch.Tensor, Any]:
        return tensor, (out, dtype)


def test_only_copies_of_weights_that_are_kept_get_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch", MODULE):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[MODULE].Quantizer = Quantizer  # type: ignore[attr-defined]
    monkeypatch.setenv(registry.UNCHECKED_VARIABLE, f"{MODULE}.Quantizer.quantize")
    inside: list[bool] = []
    seen: list[tuple[bool, Any]] = []

    @contextmanager
    def around() -> Iterator[None]:
        inside.append(True)
        try:
            yield
        finally:
            inside.pop()

    class Watched(Quantizer):
        def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: Any = None) -> tuple[torch.Tensor, Any]:
            seen.append((bool(inside), out))
            return super().quantize(tensor, out=out, dtype=dtype)

    sys.modules[MODULE].Quantizer = Watched  # type: ignore[attr-defined]
    weight, activation = nn.Parameter(torch.ones(2)), torch.ones(2)
    kept, passing = Watched(internal=False), Watched(internal=True)
    with registry.apply([te_quantize_patch(None, around)]):
        assert kept.quantize(weight, dtype=torch.bfloat16) == (weight, (None, torch.bfloat16))
        passing.quantize(weight)
        kept.quantize(activation)
        kept.quantize(weight, out="copy")
    assert seen == [(True, None), (False, None), (False, None), (False, "copy")]
    kept.quantize(weight)
    assert seen[-1] == (False, None), "the patch is taken back"


def test_without_a_gpu_nothing_changes() -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    with lasting_memory():
        assert torch.ones(2).sum() == 2


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_freed_memory_between_tensors_that_last_is_one_piece(device: str) -> None:
    """In expandable segments. Without them each tensor has a segment of its own, and nothing is divided."""
    num, passing_bytes, lasting_bytes = 16, 96 * MIB, 32 * MIB

    def empty(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def reserved_bytes(make: Callable[[], AbstractContextManager[Any]]) -> int:
        """Make both kinds in turns, free one, and allocate all of it as one tensor."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        passing, lasting = [], []
        for _ in range(num):
            passing.append(empty(passing_bytes))
            with make():
                lasting.append(empty(lasting_bytes))
        passing.clear()
        whole = empty(num * passing_bytes)
        reserved = torch.cuda.memory_reserved() - before
        del whole
        return reserved

    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        needed = num * (passing_bytes + lasting_bytes)
        assert reserved_bytes(nullcontext) > needed + (num - 1) * passing_bytes
        assert reserved_bytes(lasting_memory) < needed + 2 * passing_bytes
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")

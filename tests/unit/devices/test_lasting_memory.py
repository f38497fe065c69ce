"""What lasts does not divide the memory that activations free."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.devices import lasting_memory as lasting
from megatron.swap.devices.lasting_memory import lasting_memory
from megatron.swap.patches import registry
from megatron.swap.patches.te_weight_copies import MODULES, te_weight_copies_patches

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MIB = 1 << 20


class Quantizer:
    """As much of TransformerEngine's quantizer as its function touches."""

    internal = True


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, dict[str, Any]]]:
    """Put a function in TransformerEngine's place that notes whether it runs apart, and its options. Returns notes."""
    calls: list[tuple[bool, dict[str, Any]]] = []

    def quantize_weight(**options: Any) -> str:
        calls.append((bool(inside), options))
        if options.get("fails_apart") and inside:
            options["quantizer"].internal = False
            raise torch.OutOfMemoryError
        return "copy"

    package = "transformer_engine.pytorch.module"
    names = [f"{package}.{module}" for module in MODULES]
    for name in ("transformer_engine", "transformer_engine.pytorch", package, *names):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in names:
        sys.modules[name].quantize_weight = quantize_weight  # type: ignore[attr-defined]
    monkeypatch.setenv(registry.UNCHECKED_VARIABLE, ",".join(f"{name}.quantize_weight" for name in names))
    return calls


inside: list[float] = []


@contextmanager
def apart(num_bytes: float) -> Iterator[None]:
    inside.append(num_bytes)
    try:
        yield
    finally:
        inside.pop()


@pytest.mark.parametrize("module", MODULES)
def test_only_copies_that_are_kept_get_memory_of_their_own(upstream: list[Any], module: str) -> None:
    class InEightBits(nn.Parameter):
        pass

    weight, quantizer = nn.Parameter(torch.ones(2)), Quantizer()
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"tensor": weight, "cache": True}, True),
        ({"tensor": torch.cat([weight, weight]), "cache": True, "workspace": None}, True),
        ({"tensor": weight, "cache": False}, False),
        ({"tensor": weight, "cache": True, "workspace": "copy"}, False),
        ({"tensor": InEightBits(torch.ones(2)), "cache": True}, False),
        ({"tensor": None, "cache": True}, False),
    ]
    patched = sys.modules[f"transformer_engine.pytorch.module.{module}"]
    with registry.apply(te_weight_copies_patches(apart)):
        for options, _ in cases:
            assert patched.quantize_weight(quantizer=quantizer, **options) == "copy"
    assert [is_apart for is_apart, _ in upstream] == [is_apart for _, is_apart in cases]
    assert [given for _, given in upstream] == [options | {"quantizer": quantizer} for options, _ in cases]
    assert not inside
    patched.quantize_weight(tensor=weight, cache=True)
    assert upstream[-1][0] is False, "the patch is taken back"


def test_a_copy_that_has_no_room_apart_is_made_beside_the_others(upstream: list[Any]) -> None:
    quantizer = Quantizer()
    options = {"tensor": nn.Parameter(torch.ones(2)), "cache": True, "quantizer": quantizer, "fails_apart": True}
    with registry.apply(te_weight_copies_patches(apart)):
        assert sys.modules["transformer_engine.pytorch.module.linear"].quantize_weight(**options) == "copy"
    assert [is_apart for is_apart, _ in upstream] == [True, False]
    assert quantizer.internal, "upstream leaves it changed when it fails"


class Pools:
    """Stands for torch's pools, on a device with a given room."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, fraction: float, backend: str
    ) -> None:
        self.entered = 0
        total = 1000 << 20
        for name, value in {
            "is_available": True, "get_allocator_backend": backend, "mem_get_info": (free << 20, total),
            "get_per_process_memory_fraction": fraction, "memory_reserved": reserved << 20, "current_device": 0,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", self.use)
        monkeypatch.setattr(lasting, "_pool", lambda device: f"pool of {device}")

    @contextmanager
    def use(self, pool: str) -> Iterator[None]:
        assert pool == "pool of 0"
        self.entered += 1
        yield


@pytest.mark.parametrize(
    ("free", "reserved", "fraction", "backend", "is_used"),
    [(200, 800, 1.0, "native", True), (150, 800, 1.0, "native", False), (900, 800, 0.9, "native", False),
     (900, 700, 0.9, "native", True), (900, 0, 1.0, "cudaMallocAsync", False)],
)  # fmt: skip
def test_the_pool_is_used_where_the_device_has_room(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, fraction: float, backend: str, is_used: bool
) -> None:
    pools = Pools(monkeypatch, free, reserved, fraction, backend)
    for _ in range(2):
        with lasting_memory(100 << 20), lasting_memory(100 << 20):
            assert pools.entered == is_used, "torch refuses a pool within itself"
        pools.entered = 0
    with pytest.raises(ValueError, match="fails"), lasting_memory(100 << 20):
        raise ValueError("fails")
    with lasting_memory(100 << 20):
        assert pools.entered == 2 * is_used


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_freed_memory_between_tensors_that_last_is_one_piece(device: str) -> None:
    """In expandable segments. Without them each tensor has a segment of its own, and nothing is divided."""
    num, passing_bytes, lasting_bytes = 16, 96 * MIB, 32 * MIB

    def empty(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def reserved_bytes(make: Callable[[float], AbstractContextManager[None]]) -> int:
        """Make both kinds in turns, free one, and allocate all of it as one tensor."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        passing, lasting = [], []
        for _ in range(num):
            passing.append(empty(passing_bytes))
            with make(lasting_bytes):
                lasting.append(empty(lasting_bytes))
        passing.clear()
        whole = empty(num * passing_bytes)
        reserved = torch.cuda.memory_reserved() - before
        del whole
        return reserved

    before = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        needed = num * (passing_bytes + lasting_bytes)
        assert reserved_bytes(lambda _: nullcontext()) > needed + (num - 1) * passing_bytes
        assert reserved_bytes(lasting_memory) < needed + 2 * passing_bytes
    finally:
        torch.cuda.memory._set_allocator_settings(before)

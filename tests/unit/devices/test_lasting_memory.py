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

    def __init__(self, columnwise: bool = True) -> None:
        self.columnwise_usage = columnwise


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float | None, dict[str, Any]]]:
    """Put a function in TransformerEngine's place. Return its notes: the bytes that it had apart, and its options."""
    calls: list[tuple[float | None, dict[str, Any]]] = []

    def quantize_weight(**options: Any) -> str:
        calls.append((inside[-1] if inside else None, options))
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

    weight, training, evaluating = nn.Parameter(torch.ones(2)), Quantizer(), Quantizer(columnwise=False)
    whole = [types.SimpleNamespace(_transpose=1), types.SimpleNamespace(_columnwise_data=1)]
    half = [types.SimpleNamespace(_transpose=None), types.SimpleNamespace(_columnwise_data=None)]
    first_bytes = 2.5 * weight.numel()
    cases: list[tuple[dict[str, Any], float | None]] = [
        ({"tensor": weight, "cache": True, "quantizer": training}, first_bytes),
        ({"tensor": torch.cat([weight, weight]), "cache": True, "workspace": None, "quantizer": training},
         2 * first_bytes),
        *(({"tensor": weight, "cache": True, "quantizer": training, "workspace": copy}, 0.0) for copy in half),
        *(({"tensor": weight, "cache": True, "quantizer": training, "workspace": copy}, None) for copy in whole),
        *(({"tensor": weight, "cache": True, "quantizer": evaluating, "workspace": copy}, None)
          for copy in [None, *half, *whole]),
        ({"tensor": weight, "cache": False, "quantizer": training}, None),
        ({"tensor": InEightBits(torch.ones(2)), "cache": True, "quantizer": training}, None),
        ({"tensor": None, "cache": True, "quantizer": training}, None),
    ]  # fmt: skip
    patched = sys.modules[f"transformer_engine.pytorch.module.{module}"]
    with registry.apply(te_weight_copies_patches(apart)):
        for options, _ in cases:
            assert patched.quantize_weight(**options) == "copy"
    assert [num_bytes for num_bytes, _ in upstream] == [num_bytes for _, num_bytes in cases]
    assert [given for _, given in upstream] == [options for options, _ in cases]
    assert not inside
    patched.quantize_weight(tensor=weight, cache=True, quantizer=training)
    assert upstream[-1][0] is None, "the patch is taken back"


def test_a_copy_that_has_no_room_apart_is_made_beside_the_others(upstream: list[Any]) -> None:
    quantizer = Quantizer()
    options = {"tensor": nn.Parameter(torch.ones(2)), "cache": True, "quantizer": quantizer, "fails_apart": True}
    with registry.apply(te_weight_copies_patches(apart)):
        assert sys.modules["transformer_engine.pytorch.module.linear"].quantize_weight(**options) == "copy"
    assert [num_bytes for num_bytes, _ in upstream] == [5.0, None]
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
    with lasting_memory(0):
        assert pools.entered == 2 * is_used + (backend == "native"), "what was freed in the pool is there"


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

    was_on = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        needed = num * (passing_bytes + lasting_bytes)
        assert reserved_bytes(lambda _: nullcontext()) > needed + (num - 1) * passing_bytes
        assert reserved_bytes(lasting_memory) < needed + 2 * passing_bytes
    finally:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{was_on}")
        lasting._pool.cache_clear()  # what it has cached counts towards the limits that other tests set

"""What lasts does not divide the memory that activations free."""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.devices import lasting_memory as lasting
from megatron.swap.devices.lasting_memory import lasting_memory
from megatron.swap.patches import registry
from megatron.swap.patches.te_weight_copies import MODULES, te_weight_copies_patches


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
    usual = {"tensor": weight, "cache": True, "quantizer": training}
    cases: list[tuple[dict[str, Any], float | None]] = [
        ({}, 2.5 * weight.numel()),
        *(({"workspace": types.SimpleNamespace(**{name: None})}, 0.0) for name in ("_transpose", "_columnwise_data")),
        *(({"workspace": types.SimpleNamespace(**{name: 1})}, None) for name in ("_transpose", "_columnwise_data")),
        ({"quantizer": evaluating}, None), ({"cache": False}, None), ({"tensor": InEightBits(torch.ones(2))}, None),
        ({"tensor": None}, None),
    ]  # fmt: skip
    patched = sys.modules[f"transformer_engine.pytorch.module.{module}"]
    with registry.apply(te_weight_copies_patches(apart)):
        for options, _ in cases:
            assert patched.quantize_weight(**usual | options) == "copy"
    assert upstream == [(num_bytes, usual | options) for options, num_bytes in cases]
    assert not inside
    patched.quantize_weight(tensor=weight, cache=True, quantizer=training)
    assert upstream[-1][0] is None, "the patch is taken back"


class Pools:
    """Stands for torch's pools, on a device with a given room."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, fraction: float, backend: str
    ) -> None:
        self.entered = 0
        for name, value in {
            "is_available": True, "get_allocator_backend": backend, "mem_get_info": (free << 20, 1000 << 20),
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
    with lasting_memory(100 << 20), lasting_memory(100 << 20):
        assert pools.entered == is_used, "torch refuses a pool within itself"
    with pytest.raises(ValueError, match="fails"), lasting_memory(100 << 20):
        raise ValueError("fails")
    with lasting_memory(0):
        assert pools.entered == 2 * is_used + (backend == "native"), "what was freed in the pool is there"

"""Prices of operators by the figures of a GPU."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.swap.dry.costs import (
    LEAST_MS,
    LINEAR_SPEED,
    MEMORY_SPEED,
    OPTIMIZER_SPEED,
    SINGLE_PRECISION,
    Cost,
    cost_of,
    prefers_cudnn,
)
from megatron.swap.forecast.gpus import GPUS

GPU = replace(
    GPUS["h200"], tflops=100.0 / LINEAR_SPEED, attention_tflops=50.0, memory_gb_s=1000.0 / MEMORY_SPEED,
    optimizer_gb_s=500.0 / OPTIMIZER_SPEED,
)  # fmt: skip
aten = torch.ops.aten
N = 4096


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cost(operator: Any, *args: Any, **kwargs: Any) -> Cost:
    return cost_of(operator, args, kwargs, operator(*args, **kwargs), GPU)


SQUARE_MS = 2 * N * N / 1e9
"""Time of N x N values of two bytes on a memory of 1,000 GB/s, in ms: a millionth of its bytes."""


@pytest.mark.parametrize(("operator", "args", "ms"), [
    (aten.mm.default, (tensor(N, N), tensor(N, N)), 2 * N**3 / 100e9),
    (aten.mm.default, (tensor(N, 1), tensor(1, N)), SQUARE_MS + 4 * N / 1e9),
    (aten.bmm.default, (tensor(4, N, N), tensor(4, N, N)), 4 * 2 * N**3 / 100e9),
    (aten.mm.default, (tensor(N, N, dtype=torch.float32),) * 2, SINGLE_PRECISION * 2 * N**3 / 100e9),
    (aten._grouped_mm.default, (tensor(N, N), tensor(8, N, N), tensor(8, dtype=torch.int32)), 2 * N**3 / 100e9),
    (aten.add.Tensor, (tensor(N, N), tensor(N, N)), 3 * SQUARE_MS),
    (aten.add.Tensor, (tensor(N, N), tensor(1, N).expand(N, N)), 2 * SQUARE_MS + 2 * N / 1e9),
    (aten.zero_.default, (tensor(N, N),), SQUARE_MS),
    (aten._to_copy.default, (tensor(N, N),), 2 * SQUARE_MS),
    (aten.embedding.default, (tensor(10 * N, N), tensor(N, dtype=torch.long)), 2 * SQUARE_MS + 8 * N / 1e9),
    (aten._foreach_add_.List, ([tensor(N, N)], [tensor(N, N)]), 2 * 3 * SQUARE_MS),
    (aten.add.Tensor, (tensor(1), tensor(1)), LEAST_MS),
    (aten.t.default, (tensor(N, N),), 0.0),
])  # fmt: skip
def test_time(operator: Any, args: tuple[Any, ...], ms: float) -> None:
    assert cost(operator, *args).ms == pytest.approx(ms)
    assert cost(operator, *args).workspace_bytes == ()


@pytest.mark.parametrize(
    ("version", "variable", "is_preferred"),
    [(91900, None, True), (91900, "1", False), (91500, None, False)],
)
def test_which_attention_pytorch_takes(
    version: int | None, variable: str | None, is_preferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn = None if version is None else SimpleNamespace(getVersionInt=lambda: version)
    monkeypatch.setattr(torch._C, "_cudnn", cudnn, raising=False)
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", variable)
    assert prefers_cudnn() is is_preferred
    query = tensor(1, 8, N, 128)
    forward_ms = cost(aten._scaled_dot_product_flash_attention.default, query, query, query).ms
    speed = 1.0 if is_preferred else GPU.own_flash_speeds[0]
    assert forward_ms == pytest.approx(4 * 8 * N * N * 128 / (speed * 50e9))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_keys", [2, 8])
def test_attention(is_causal: bool, num_keys: int) -> None:
    query, key = tensor(1, 8, N, 128), tensor(1, num_keys, N, 128)
    forward_ms = 4 * 8 * N * N * 128 / (2 if is_causal else 1) / 50e9
    forward = aten._scaled_dot_product_flash_attention.default
    assert cost(forward, query, key, key, 0.0, is_causal).ms == pytest.approx(forward_ms)
    output, sums, *_ = forward(query, key, key, 0.0, is_causal)
    backward = cost(
        aten._scaled_dot_product_flash_attention_backward.default, output, query, key, key, output, sums, None, None,
        N, N, 0.0, is_causal, torch.empty(2, dtype=torch.uint64, device="meta"),
        torch.empty((), dtype=torch.uint64, device="meta"),
    )  # fmt: skip
    assert backward.ms == pytest.approx(2.9 * forward_ms)
    by_query = [query.nbytes, query.nbytes] if num_keys < 8 else []
    assert backward.workspace_bytes == (sums.nbytes, 2 * query.nbytes, *by_query)


@pytest.mark.parametrize(("shape", "order", "dims", "mib"), [
    ((1, 8192, N), (0, 1, 2), (0, 1), 132),  # the first two are in the run of h200-allocator/any-model-26.9
    ((1, 8, 8192, 128), (0, 2, 1, 3), (0, 1, 2), 64),
    ((8192, N), (0, 1), (-2,), 132),
    ((8192, 2880), (0, 1), (0,), 129.375),
    ((8192, N), (0, 1), (1,), 0),
    ((8192, N), (1, 0), (0,), 0),
    ((2, 8192, N), (0, 1, 2), (1,), 0),
    ((0, N), (0, 1), (0,), 0),
])  # fmt: skip
def test_sums_of_columns_keep_partial_sums(
    shape: tuple[int, ...], order: tuple[int, ...], dims: tuple[int, ...], mib: float
) -> None:
    found = cost(aten.sum.dim_IntList, tensor(*shape).permute(order), dims)
    assert sum(found.workspace_bytes) == mib * 2**20

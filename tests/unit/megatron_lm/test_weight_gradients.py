"""The kernel that adds weight gradients to ``main_grad``: by TransformerEngine, and where Megatron calls it."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state  # noqa: F401  # upstream's drain imports it
from megatron.core.tensor_parallel import layers

from megatron.swap.megatron_lm import weight_gradients
from megatron.swap.megatron_lm.weight_gradients import TE_MODULE, TransformerEngineKernel, te_kernel
from megatron.swap.patches import registry
from megatron.swap.patches.weight_gradient_kernel import APEX_MODULE, SYMBOL, weight_gradient_kernel_patches
from megatron.swap.trainer import upstream

TOLERANCE = 1e-6
"""Root mean square of the errors, relative to that of the sums of the products' magnitudes. Products are exact, their
sum is in fp32. Rounding the gradient to bf16 before it is added is above it."""


def gemm(
    A: torch.Tensor, B: torch.Tensor, out_dtype: torch.dtype | None = None, accumulate: bool = False,
    layout: str = "TN", out: torch.Tensor | None = None, use_split_accumulator: bool = False, grad: bool = False,
) -> None:  # fmt: skip
    """TransformerEngine's product as far as the kernel needs it. Like the original it reads memory as it lies there."""
    assert layout == "NT"
    assert grad
    assert out is not None
    assert out_dtype is out.dtype
    inputs, grad_output = (
        torch.as_strided(given, given.shape, (given.shape[1], 1), given.storage_offset()) for given in (A, B)
    )
    if not accumulate:
        out.zero_()
    out.add_(grad_output.t().float().matmul(inputs.float()))


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a product of single precision is torch's")


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize(("dtype", "main_dtype", "product"), [
    (torch.bfloat16, torch.float32, gemm), (torch.bfloat16, torch.bfloat16, gemm),
    (torch.float32, torch.float32, refuse),
])  # fmt: skip
def test_adds_to_what_is_there(dtype: torch.dtype, main_dtype: torch.dtype, product: Any) -> None:
    """In fp32 without rounding between; in 16 bits no worse than Megatron's product, rounded, and sum, rounded."""
    inputs, grad_output = random(96, 24, dtype=dtype), random(96, 40, dtype=dtype)
    main_grad = random(40, 24, dtype=main_dtype)
    expected = main_grad.double() + grad_output.double().t() @ inputs.double()
    magnitude = main_grad.double().abs() + grad_output.double().abs().t() @ inputs.double().abs()
    of_unfused = ((main_grad + grad_output.t() @ inputs).double() - expected).norm()
    kernel = TransformerEngineKernel(product)
    add = kernel.wgrad_gemm_accum_fp32 if main_dtype == torch.float32 else kernel.wgrad_gemm_accum_fp16
    add(inputs, grad_output, main_grad)
    error = (main_grad.double() - expected).norm()
    assert error <= (TOLERANCE * magnitude.norm() if main_dtype == torch.float32 else 1.05 * of_unfused)


def test_inputs_of_any_layout() -> None:
    inputs, grad_output = (random(6, 4, width, dtype=torch.bfloat16) for width in (24, 40))
    expected = torch.ones(40, 24).addmm_(grad_output.view(24, 40).t().float(), inputs.view(24, 24).float())
    for x, dy in (
        (inputs, grad_output),
        (inputs.view(24, 24).t().contiguous().t(), grad_output.view(24, 40).t().contiguous().t()),
    ):
        main_grad = torch.ones(40, 24)
        TransformerEngineKernel(gemm).wgrad_gemm_accum_fp32(x, dy, main_grad)
        torch.testing.assert_close(main_grad, expected)


def stand_in(monkeypatch: pytest.MonkeyPatch, general_gemm: Any) -> None:
    module = ModuleType(TE_MODULE)
    module.general_gemm = general_gemm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, TE_MODULE, module)


def take_out() -> None:
    while upstream._supplied:
        upstream._supplied.pop().revert()


@pytest.fixture
def unsupplied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process whose linear layers have no kernel, before and after."""
    take_out()
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    yield
    take_out()
    assert not registry.is_patched(SYMBOL)


def supply(fuses: bool = True) -> list[str]:
    return upstream.supply_fusion_kernel(SimpleNamespace(gradient_accumulation_fusion=fuses))


@pytest.mark.usefixtures("unsupplied")
def test_supplied_once_and_taken_out_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, gemm)
    before = hasattr(layers, APEX_MODULE)
    patches = weight_gradient_kernel_patches(te_kernel())
    with registry.apply(patches):
        assert weight_gradients.has_kernel()
    assert hasattr(layers, APEX_MODULE) == before
    assert not weight_gradients.has_kernel()
    for _ in range(2):
        assert not supply()
        assert isinstance(layers.fused_weight_gradient_mlp_cuda, TransformerEngineKernel)
    assert APEX_MODULE not in sys.modules


@pytest.mark.usefixtures("unsupplied")
@pytest.mark.parametrize("reason", ["not asked for", "apex", "no TransformerEngine", "an old one"])
def test_nothing_is_changed(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def of_2_1(A: Any, B: Any, workspace: Any, out: Any = None, **options: Any) -> None: ...

    stand_in(monkeypatch, of_2_1 if reason == "an old one" else gemm)
    if reason == "no TransformerEngine":
        monkeypatch.setitem(sys.modules, TE_MODULE, None)  # type: ignore[arg-type]
    if reason == "apex":
        monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    assert not supply(reason != "not asked for")
    assert not registry.is_patched(SYMBOL)

"""The kernel that adds weight gradients to ``main_grad``: by TransformerEngine, and where Megatron calls it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state  # noqa: F401  # upstream's drain imports it
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers

from megatron.swap.cli import doctor
from megatron.swap.megatron_lm import weight_gradients
from megatron.swap.megatron_lm.weight_gradients import TE_MODULE, TransformerEngineKernel, te_kernel
from megatron.swap.patches import registry
from megatron.swap.patches.weight_gradient_kernel import APEX_MODULE, SYMBOL, weight_gradient_kernel_patches
from megatron.swap.trainer import upstream

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = 1e-6
"""Root mean square of the errors, relative to that of the sums of the products' magnitudes. Products are exact, their
sum is in fp32. Rounding the gradient to bf16 before it is added, or fp32 factors to TF32, is above it."""
OF_ONE = 4e-6
"""The same for each entry. Tensor cores round sums towards zero, so the largest sums have the largest errors."""


def gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> None:
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


def random(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def assert_added(
    kernel: TransformerEngineKernel,
    dtype: torch.dtype,
    main_dtype: torch.dtype,
    sizes: tuple[int, int, int],
    device: str,
) -> None:
    """Check one addition to a ``main_grad`` that is not zero against double precision."""
    tokens, num_inputs, num_outputs = sizes
    inputs = random(tokens, num_inputs, dtype=dtype, device=device)
    grad_output = random(tokens, num_outputs, dtype=dtype, device=device)
    main_grad = random(num_outputs, num_inputs, dtype=main_dtype, device=device)
    expected = main_grad.double() + grad_output.double().t() @ inputs.double()
    magnitude = main_grad.double().abs() + grad_output.double().abs().t() @ inputs.double().abs()
    unfused = (main_grad + grad_output.t() @ inputs).double()
    add = kernel.wgrad_gemm_accum_fp32 if main_dtype == torch.float32 else kernel.wgrad_gemm_accum_fp16
    add(inputs, grad_output, main_grad)
    errors = (main_grad.double() - expected).abs()
    if main_dtype == torch.float32:
        assert errors.norm() <= TOLERANCE * magnitude.norm()
        assert (errors <= OF_ONE * magnitude).all()
    else:
        # cuBLAS may split a product and round its parts to 16 bits, as it may in torch's product. So the bound is what
        # Megatron does without fusion: it rounds the product, and then the sum.
        of_unfused = (unfused - expected).abs()
        assert errors.norm() <= 1.05 * of_unfused.norm(), (errors.norm(), of_unfused.norm())
        assert errors.max() <= 2 * of_unfused.max(), (errors.max(), of_unfused.max())


@pytest.mark.parametrize(("dtype", "main_dtype", "product"), [
    (torch.bfloat16, torch.float32, gemm), (torch.bfloat16, torch.bfloat16, gemm),
    (torch.float16, torch.float32, gemm), (torch.float32, torch.float32, refuse),
])  # fmt: skip
def test_adds_to_what_is_there(dtype: torch.dtype, main_dtype: torch.dtype, product: Any) -> None:
    assert_added(TransformerEngineKernel(product), dtype, main_dtype, (96, 24, 40), "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_of_any_layout(dtype: torch.dtype) -> None:
    inputs, grad_output = random(6, 4, 24, dtype=dtype), random(6, 4, 40, dtype=dtype)
    expected = torch.ones(40, 24).addmm_(grad_output.view(24, 40).t().float(), inputs.view(24, 24).float())
    for x, dy in (
        (inputs, grad_output),
        (inputs.view(24, 24), grad_output.view(24, 40)),
        (inputs.view(24, 24).t().contiguous().t(), grad_output.view(24, 40).t().contiguous().t()),
    ):
        main_grad = torch.ones(40, 24)
        TransformerEngineKernel(gemm).wgrad_gemm_accum_fp32(x, dy, main_grad)
        torch.testing.assert_close(main_grad, expected)


# --------------------------------------------------------------------------------------- where it is supplied


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


def asking(fuses: bool = True) -> Any:
    return SimpleNamespace(gradient_accumulation_fusion=fuses)


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
        assert not upstream.supply_fusion_kernel(asking())
        assert isinstance(layers.fused_weight_gradient_mlp_cuda, TransformerEngineKernel)
    assert APEX_MODULE not in sys.modules


@pytest.mark.usefixtures("unsupplied")
@pytest.mark.parametrize("reason", ["not asked for", "apex", "no TransformerEngine", "an old one", "a broken one"])
def test_nothing_is_changed(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def of_2_1(A: Any, B: Any, workspace: Any, out: Any = None, **options: Any) -> None: ...

    stand_in(monkeypatch, of_2_1 if reason == "an old one" else gemm)
    if reason in ("no TransformerEngine", "a broken one"):
        broken = None if reason == "no TransformerEngine" else object()
        monkeypatch.setitem(sys.modules, TE_MODULE, broken)  # type: ignore[arg-type]
    if reason == "apex":
        monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    assert not upstream.supply_fusion_kernel(asking(reason != "not asked for"))
    assert not registry.is_patched(SYMBOL)


@pytest.mark.usefixtures("unsupplied")
def test_a_megatron_that_calls_it_otherwise_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, gemm)
    name = "LinearWithGradAccumulationAndAsyncCommunication"
    monkeypatch.setattr(layers, name, type(name, (getattr(layers, name),), {}))
    misfits = upstream.supply_fusion_kernel(asking())
    (line,) = registry.lost_features(misfits)
    assert line.startswith("without TransformerEngine's kernel for --gradient-accumulation-fusion")
    assert not weight_gradients.has_kernel()


@pytest.mark.usefixtures("unsupplied")
def test_what_is_deferred_to_the_end_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's drain imports apex's module. It runs where every other linear layer is TransformerEngine's."""
    stand_in(monkeypatch, gemm)
    upstream.supply_fusion_kernel(asking())
    inputs = [random(4, 2, 24, dtype=torch.bfloat16) for _ in range(3)]
    grads = [random(4, 2, 40, dtype=torch.bfloat16) for _ in range(3)]
    weight = SimpleNamespace(main_grad=torch.ones(40, 24))
    expected = torch.ones(40, 24)
    for x, dy in zip(inputs, grads, strict=True):
        expected.addmm_(dy.view(8, 40).t().float(), x.view(8, 24).float())
    config = SimpleNamespace(sequence_parallel=False, gradient_accumulation_fusion=True)
    group = SimpleNamespace(size=lambda: 1)
    schedules.drain_embedding_wgrad_compute(config, inputs, grads, weight, group)
    torch.testing.assert_close(weight.main_grad, expected)
    assert APEX_MODULE not in sys.modules


@pytest.mark.usefixtures("unsupplied")
@pytest.mark.parametrize("whose", ["apex", "TransformerEngine", None])
def test_the_doctor_says_whose_kernel_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whose: str | None
) -> None:
    if whose is None:
        monkeypatch.setitem(sys.modules, TE_MODULE, None)  # type: ignore[arg-type]
    else:
        stand_in(monkeypatch, gemm)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", whose == "apex")
    assert doctor.main([]) == 0
    said = capsys.readouterr()
    assert ("Add --no-gradient-accumulation-fusion" in said.err) == (whose is None)
    named = [line for line in said.out.splitlines() if "uses the kernel of" in line]
    assert [line.split()[-1] for line in named] == ([] if whose is None else [whose])


# ------------------------------------------------------------------------------------------------------ on a GPU

SIZES = [(8192, 4096, 32000), (16384, 4096, 4096), (777, 264, 1048)]
"""Tokens, input features, output features: an output layer, an attention's projection, and sizes of no tile."""


@pytest.fixture
def on_gpu() -> TransformerEngineKernel:
    pytest.importorskip("transformer_engine.pytorch")
    kernel = te_kernel()
    assert kernel is not None, "TransformerEngine is there, and its general_gemm takes other arguments"
    return kernel


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "main_dtype"), [
    (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32),
    (torch.float16, torch.float16), (torch.float32, torch.float32),
])  # fmt: skip
def test_transformer_engine_adds_on_a_gpu(
    on_gpu: TransformerEngineKernel, dtype: torch.dtype, main_dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    assert_added(on_gpu, dtype, main_dtype, sizes, "cuda")


@pytest.mark.gpu
@NEEDS_CUDA
def test_layouts_and_no_tokens_on_a_gpu(on_gpu: TransformerEngineKernel) -> None:
    inputs = random(512, 264, dtype=torch.bfloat16, device="cuda")
    grad_output = random(512, 1048, dtype=torch.bfloat16, device="cuda")
    expected, strided, batched = (torch.ones(1048, 264, device="cuda") for _ in range(3))
    on_gpu.wgrad_gemm_accum_fp32(inputs, grad_output, expected)
    on_gpu.wgrad_gemm_accum_fp32(inputs.t().contiguous().t(), grad_output.t().contiguous().t(), strided)
    on_gpu.wgrad_gemm_accum_fp32(inputs.view(64, 8, 264), grad_output.view(64, 8, 1048), batched)
    assert torch.equal(expected, strided)
    assert torch.equal(expected, batched)
    on_gpu.wgrad_gemm_accum_fp32(inputs[:0], grad_output[:0], batched)
    assert torch.equal(expected, batched)
    with pytest.raises(ValueError, match="contiguous"):
        on_gpu.wgrad_gemm_accum_fp32(inputs, grad_output, torch.ones(264, 1048, device="cuda").t())

"""A stand-in for TransformerEngine's 8 bits, on the CPU: quantizers, wrapper tensors, layers that save their values.

Values are int8. Names of attributes and the order of events are TransformerEngine's: a module quantizes its input,
keeps the values for the weight's gradient only, saves them as plain tensors beside a cached weight, which is a wrapper,
and in backward empties the tensors that it has used. With delayed scaling the scales change between forward and
backward.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from megatron.swap.megatron_lm.producers import record_norm_of_linear
from megatron.swap.megatron_lm.quantized import caches, record_quantization
from megatron.swap.patches.registry import UNCHECKED_VARIABLE, Patch
from megatron.swap.patches.te_normalization import te_normalization_patch
from megatron.swap.patches.te_quantize import te_quantize_patch
from tests.engine import HIDDEN, Engine

LARGEST = 127.0


class Quantizer:
    def __init__(self) -> None:
        self.rowwise_usage = self.columnwise_usage = self.internal = True

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.quantize(tensor)

    def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: Any = None) -> Any:
        if out is not None:  # in place, as a cached weight is updated
            for name, values in self.make(tensor.detach()).items():
                getattr(out, name).copy_(values)
            return out
        return self.make_quantized(tensor)

    def make_quantized(self, tensor: torch.Tensor) -> Any:
        """Return a new quantized tensor. TransformerEngine's fused norm calls this, and not ``quantize``."""
        made = self.make(tensor.detach())
        return Values(made) if self.internal else Wrapper(made, tensor.shape, tensor.dtype)

    def copy(self) -> Quantizer:
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        return other

    def is_requantization_safe(self) -> bool:
        return False

    def make(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError


def rounded(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (tensor * scale).round().clamp(-LARGEST, LARGEST).to(torch.int8)


def with_one_scale(tensor: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    data = rounded(tensor, scale)
    return {"_data": data, "_transpose": data.t().contiguous(), "_scale_inv": 1 / scale}


class Current(Quantizer):
    """One scale, from the tensor itself (tensorwise)."""

    def is_requantization_safe(self) -> bool:
        return True

    def make(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return with_one_scale(tensor, (LARGEST / tensor.abs().max().clamp(min=1e-12)).reshape(1).float())


class Delayed(Quantizer):
    """One scale, from what earlier tensors had; notes the largest value of this one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.amax = torch.full((1,), 20.0), torch.zeros(1)
        self.history: list[float] = []

    def make(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        torch.maximum(self.amax, tensor.abs().max().float().reshape(1), out=self.amax)
        return with_one_scale(tensor, self.scale)

    def roll(self) -> None:
        """Take the next scale from the history, at the end of each forward."""
        self.history.append(float(self.amax))
        self.scale.copy_(LARGEST / (1.5 * max(self.history[-4:]) + 1e-6))
        self.amax.zero_()


class Blockwise(Quantizer):
    """A scale for each row, and others for each column: neither direction's values are the other's transposed."""

    def is_requantization_safe(self) -> bool:
        return True

    def make(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = {}
        for name, values in (("rowwise", tensor), ("columnwise", tensor.t())):
            scale = LARGEST / values.abs().amax(1, keepdim=True).clamp(min=1e-12).float()
            parts |= {f"_{name}_data": rounded(values, scale), f"_{name}_scale_inv": 1 / scale}
        return parts


NAMES = ("_data", "_transpose", "_scale_inv", "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv",
         "_columnwise_scale_inv")  # fmt: skip


class Parts:
    def hold(self, made: dict[str, torch.Tensor]) -> None:
        for name in NAMES:
            setattr(self, name, made.get(name))

    def drop_rowwise(self) -> None:
        self._data = self._rowwise_data = self._rowwise_scale_inv = None

    def by_row(self) -> torch.Tensor:
        data = self._data if self._rowwise_data is None else self._rowwise_data
        return data.float() * (self._scale_inv if self._rowwise_scale_inv is None else self._rowwise_scale_inv)

    def by_column(self) -> torch.Tensor:
        if self._columnwise_data is not None:
            return self._columnwise_data.float() * self._columnwise_scale_inv
        if self._transpose is None:  # rebuilt where it is missing
            self._transpose = self._data.t().contiguous()
        return self._transpose.float() * self._scale_inv


class Values(Parts):
    """A quantized tensor that no operation of torch sees: it is saved as its plain tensors."""

    def __init__(self, made: dict[str, torch.Tensor]) -> None:
        self.hold(made)

    def prepare_for_saving(self) -> list[torch.Tensor | None]:
        tensors = [getattr(self, name) for name in NAMES]
        self.hold({})
        return tensors

    def restore(self, tensors: list[torch.Tensor | None]) -> None:
        self.hold(dict(zip(NAMES, tensors, strict=True)))


class Wrapper(Parts, torch.Tensor):
    @staticmethod
    def __new__(cls, made: dict[str, torch.Tensor], shape: torch.Size, dtype: torch.dtype, label: str = "") -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")

    def __init__(self, made: dict[str, torch.Tensor], shape: Any, dtype: torch.dtype, label: str = "") -> None:
        self.hold(made)
        self.label = label

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [name for name in NAMES if getattr(self, name) is not None], {"dtype": self.dtype, "label": self.label}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Wrapper:
        return Wrapper(inner, size, context["dtype"], context["label"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            of = arguments[0]
            inner = {name: getattr(of, name) for name in NAMES if getattr(of, name) is not None}
            return Wrapper(inner, of.shape, of.dtype, of.label)
        raise NotImplementedError(f"{function} of a quantized tensor")


def apply_normalization(x: Any, out: Any, weight: Any, bias: Any, eps: float, quantizer: Any, *rest: Any) -> Any:
    """Normalize as TransformerEngine's function of this name; with a quantizer the output is quantized at once."""
    normed, mean, rstd = torch.ops.aten.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)
    return (normed if quantizer is None else quantizer.make_quantized(normed)), mean, rstd


class _Linear(torch.autograd.Function):
    """``y = x @ w.t()`` of quantized tensors; with a norm's parameters, of the quantized norm of x."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, norm_weight: Any, norm_bias: Any, module: Linear) -> Any:
        flat = x.view(-1, x.shape[-1])
        statistics: Any = ()
        if norm_weight is None:
            values = module.quantizer(flat)
        else:
            upstream = sys.modules.get("transformer_engine.pytorch.module.layernorm_linear")
            normalize = apply_normalization if upstream is None else upstream.apply_normalization
            values, *statistics = normalize(flat, None, norm_weight, norm_bias, 1e-5, module.quantizer, flat.dtype)
        cached = module.cached_weight()
        out = values.by_row() @ cached.by_row().t()
        values.drop_rowwise()
        ctx.values, ctx.shape, ctx.has_norm = values, x.shape, norm_weight is not None
        extra = (flat, norm_weight, norm_bias, *statistics) if ctx.has_norm else ()
        ctx.save_for_backward(*values.prepare_for_saving(), cached, weight, *extra)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        tensors = ctx.saved_tensors
        ctx.values.restore(tensors[: len(NAMES)])
        cached, _, *extra = tensors[len(NAMES) :]
        grad = grad.reshape(-1, grad.shape[-1])
        grad_weight = grad.t() @ ctx.values.by_column().t()
        for tensor in tensors[: len(NAMES)]:
            if tensor is not None:
                tensor.data = torch.empty(0)  # TransformerEngine frees what it has used
        grad_input = grad @ cached.by_column().t()
        if not ctx.has_norm:
            return grad_input.view(ctx.shape), grad_weight, None, None, None
        flat, norm_weight, norm_bias, mean, rstd = extra
        grads = torch.ops.aten.native_layer_norm_backward(
            grad_input, flat, [flat.shape[-1]], mean, rstd, norm_weight, norm_bias, [True, True, True]
        )
        return grads[0].view(ctx.shape), grad_weight, *grads[1:], None


class Linear(nn.Module):
    def __init__(self, kind: type[Quantizer], in_features: int, out_features: int, has_norm: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)
        self.norm_weight = nn.Parameter(torch.ones(in_features)) if has_norm else None
        self.norm_bias = nn.Parameter(torch.zeros(in_features)) if has_norm else None
        self.quantizer = kind()
        self._weight_quantizer = Current() if kind is Delayed else kind()
        self._weight_quantizer.internal = False
        self._cached: Wrapper | None = None

    def cached_weight(self) -> Wrapper:
        """Return the quantized weight, made once and updated in place later."""
        self._cached = self._weight_quantizer.quantize(self.weight, out=self._cached)
        return self._cached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(x, self.weight, self.norm_weight, self.norm_bias, self)


class _Mixed(torch.autograd.Function):
    """Mixes tokens, and saves a wrapper whole, as attention in 8 bits does. The wrapper has a transpose as cache."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Layer) -> torch.Tensor:
        values = module.mixing(x)
        values.label = "mixed"
        ctx.save_for_backward(values)
        return x + values.by_row().sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (values,) = ctx.saved_tensors
        assert type(values) is Wrapper
        assert values.label == "mixed"
        return grad + grad * values.by_row().cos(), None


class Layer(nn.Module):
    def __init__(self, kind: type[Quantizer] = Current) -> None:
        super().__init__()
        self.linear_qkv = Linear(kind, HIDDEN, 3 * HIDDEN, has_norm=True)
        self.linear_proj = Linear(kind, 3 * HIDDEN, HIDDEN)
        self.mlp = nn.Module()
        self.mlp.linear_fc1 = Linear(kind, HIDDEN, 4 * HIDDEN, has_norm=True)
        self.mlp.linear_fc2 = Linear(kind, 4 * HIDDEN, HIDDEN)
        self.activation = functional.gelu
        self.mixing = Blockwise() if kind is Blockwise else Current()
        self.mixing.internal = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        context = self.linear_qkv(hidden_states).tanh()
        hidden_states = _Mixed.apply(hidden_states + self.linear_proj(context), self)
        return hidden_states + self.mlp.linear_fc2(self.activation(self.mlp.linear_fc1(hidden_states)))


def quantizers_of(layers: nn.Module) -> list[Delayed]:
    found = (getattr(module, "quantizer", None) for module in layers.modules())
    return [one for one in found if isinstance(one, Delayed)]


def take_place(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-in where TransformerEngine's modules would be."""
    names = "transformer_engine.pytorch.module.layernorm_linear", "transformer_engine.pytorch.quantized_tensor"
    for name in names:
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            whole = ".".join(parts[:i])
            if whole not in sys.modules:
                patch.setitem(sys.modules, whole, types.ModuleType(whole))
    sys.modules[names[0]].apply_normalization = apply_normalization  # type: ignore[attr-defined]
    sys.modules[names[1]].Quantizer = Quantizer  # type: ignore[attr-defined]
    patch.setenv(UNCHECKED_VARIABLE, f"{names[0]}.apply_normalization,{names[1]}.Quantizer.quantize")


def patches_for(engine: Engine) -> list[Patch]:
    return [
        te_normalization_patch(lambda *what: record_norm_of_linear(engine.recomputer, *what)),
        te_quantize_patch(lambda *what: record_quantization(engine.recomputer, *what)),
    ]


def rules() -> Any:
    """Return the rules for the stand-in's wrappers, with the product's choice of caches."""
    from megatron.swap.engine.wrapper_tensors import WrapperRules

    return WrapperRules(kinds=(Wrapper,), caches=caches)

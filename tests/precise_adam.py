"""A stand-in for TransformerEngine's Adam of the precision-aware optimizer, on the CPU.

Types of main values and moments, scales by parameter, remainders of main values: names and order of events are
TransformerEngine's. The arithmetic is ours.
"""

from __future__ import annotations

from typing import Any

import torch

LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2, torch.uint8: 448.0}


class Quantizer:
    def __init__(self) -> None:
        self.scale = torch.ones(1)
        self.has_columns = True

    def set_usage(self, *, columnwise: bool) -> None:
        self.has_columns = columnwise


class Float8Tensor(torch.Tensor):
    """Values in 8 bits with one scale, and a transpose that nobody reads."""

    _data: torch.Tensor
    _transpose: torch.Tensor | None
    _quantizer: Quantizer
    _scale_inv: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Float8Tensor:
        made: Float8Tensor = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made._data, made._quantizer, made._transpose = data, Quantizer(), data.t().clone() if data.dim() > 1 else None
        made._scale_inv = torch.ones(1)
        return made

    def update_usage(self, *, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert rowwise_usage
        assert not columnwise_usage
        self._transpose = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args
            scaled = (source * target._quantizer.scale).to(torch.float8_e4m3fn)
            target._data.copy_(scaled.view(torch.uint8))
            torch.reciprocal(target._quantizer.scale, out=target._scale_inv)
            if target._quantizer.has_columns and target._data.dim() > 1:
                target._transpose = target._data.t().clone()
            return target
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)

    def float(self, *_: Any) -> torch.Tensor:
        return self._data.view(torch.float8_e4m3fn).float() * self._scale_inv


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode
        assert not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype,
        }  # fmt: skip
        self.store_param_remainders = (
            store_param_remainders and master_weights and master_weight_dtype is torch.float32
        )
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def has_remainders(self, param: torch.Tensor) -> bool:
        return self.store_param_remainders and param.dtype is torch.bfloat16

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        for name in self.name_to_dtype_map:
            if name == "master_param" and not self.master_weights:
                continue
            self.initialize_one(param, name, store_param_remainders)
            if name == "master_param" and not store_param_remainders:
                self.store(param, name, param.detach().float())

    def initialize_one(self, param: torch.Tensor, name: str, store_param_remainders: bool) -> None:
        is_remainder = name == "master_param" and store_param_remainders
        dtype = torch.int16 if is_remainder else self.name_to_dtype_map[name]
        zeros = torch.zeros_like(param, dtype=dtype)
        self.state[param][name] = Float8Tensor(zeros) if dtype is torch.uint8 else zeros
        if self.name_to_dtype_map[name] is not torch.float32:
            self._scales.setdefault(param, {})[name] = torch.ones(1)

    def values(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Return a state in fp32, a copy unless it is in fp32."""
        state = self.get_unscaled_state(param, name)
        if state.dtype is torch.int16:
            bits = (param.detach().view(torch.int16).int() << 16) + state.int()
            return bits.view(torch.float32)
        return state

    def store(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        state = self.state[param][name]
        if state.dtype is torch.int16:
            bits = values.view(torch.int32)
            high = (bits + 0x8000) >> 16
            state.copy_((bits - (high << 16)).short())
            param.copy_(high.short().view(torch.bfloat16))
        elif (largest := LARGEST.get(self.name_to_dtype_map[name])) is not None:
            scale = self._scales[param][name]
            torch.div(values.abs().max().reshape(1), largest, out=scale)
            reciprocal = torch.where(scale > 0, scale.reciprocal(), 1.0)
            if isinstance(state, Float8Tensor):
                state._quantizer.scale.copy_(reciprocal)
                state.copy_(values)
            else:
                state.copy_(values * reciprocal)
        elif state is not values:
            state.copy_(values)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                gradient = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if gradient is None:
                    continue
                if not self.state[param]:
                    self.initialize_state(param, self.has_remainders(param))
                self._update(group, param, gradient.float())

    def _update(self, group: dict[str, Any], param: torch.Tensor, gradient: torch.Tensor) -> None:
        (one, two), number = group["betas"], group["step"]
        mean, square = self.values(param, "exp_avg"), self.values(param, "exp_avg_sq")
        has_main = "master_param" in self.state[param]
        main = self.values(param, "master_param") if has_main else param
        mean.lerp_(gradient, 1 - one)
        square.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        root = (square / (1 - two**number)).sqrt_().add_(group["eps"])
        main.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, root, value=-group["lr"] / (1 - one**number))
        self.store(param, "exp_avg", mean)
        self.store(param, "exp_avg_sq", square)
        if has_main:
            if not self.has_remainders(param):
                param.copy_(main)
            self.store(param, "master_param", main)

    def get_unscaled_state(self, param: torch.Tensor, name: str, skip_unscale: bool = False) -> torch.Tensor:
        """Return a state in fp32, for a step or a checkpoint; remainders as they are."""
        state = self.state[param][name]
        if state.dtype is torch.int16:
            return state
        if state.dtype is torch.bfloat16:
            assert name in self._scales[param]
        if state.dtype is torch.float16:
            return state.float().mul_(self._scales[param][name])
        return state.float()

    def set_scaled_state(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Set a state from a checkpoint."""
        if name not in self.state[param]:
            self.initialize_one(param, name, self.has_remainders(param))
        state = self.state[param][name]
        if state.dtype is torch.int16:
            state.copy_(values)
        else:
            self.store(param, name, values)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number in found["state"]:
                found["state"][number] = {name: self.get_unscaled_state(param, name) for name in found["state"][number]}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number in state_dict["state"]:
                self.state[param] = {}
                for name, value in state_dict["state"][number].items():
                    is_remainder = name == "master_param" and self.has_remainders(param)
                    self.set_scaled_state(param, name, value if is_remainder else value.float())

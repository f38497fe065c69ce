"""Adapts a Megatron optimizer to a step that runs bucket by bucket, and restores it afterwards.

Megatron still computes gradients, their norm, clipping and loss scaling, which read only gradients: these are never
offloaded. The adapter replaces the step of the inner optimizer (torch's or TransformerEngine's). It also replaces the
copy of new main parameters to the model, which runs while the main parameters are on the device. Before a checkpoint is
saved or loaded, offloaded state is materialized as tensors in host memory.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    MixedPrecisionOptimizer,
)

from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm import quantized_params, scaled_state
from megatron.swap.megatron_lm.quantized_params import has_quantized_params
from megatron.swap.optimizer.param_state import MAIN
from megatron.swap.optimizer.partial_step import Table
from megatron.swap.optimizer.stepper import OnUpdated, OptimizerStepper
from megatron.swap.planning.training_steps import params_of

# Classes of elementwise optimizers, which may step slices of parameters.
ELEMENTWISE = frozenset({"Adam", "AdamW", "CPUAdam", "FusedAdam", "FusedSGD", "Lion", "SGD"})
# Classes, or base classes, of optimizers that step each parameter as a whole, such as Muon.
PARAMETERWISE = frozenset({"OrthogonalizedOptimizer", "SOAP"})
# Moments of each parameter that the first step creates; those of other classes exist before it.
NUM_MOMENTS = {"AdaptiveMuon": 2, "OrthogonalizedOptimizer": 1, "SOAP": 2}
MOMENT_BYTES = 4  # most bytes of a moment per element of its parameter

SCALES = "_scales"  # attribute of TransformerEngine's Adam: scales by parameter and name

_MISSING = object()


class Override(NamedTuple):
    """A method that is replaced while a Megatron optimizer is adapted."""

    owner: Any  # the Megatron optimizer or its inner one
    method: str
    handler: Callable[..., Any]  # called with the original method and the caller's arguments
    is_for_saving: bool = False  # stays replaced when training fails, so that state can still be saved
    reads_host: bool = False  # stays replaced when training has ended and state is in host memory


class AdaptedOptimizer:
    """A ``MegatronOptimizer``, not chained, whose inner optimizer is stepped by ``stepper`` while installed."""

    def __init__(self, optimizer: Any, stepper: OptimizerStepper) -> None:
        self.stepper = stepper
        self._optimizer = optimizer
        self._replaced: list[tuple[Override, Any]] = []  # and the owner's own attribute of that name
        overrides = [
            Override(optimizer.optimizer, "step", self._step),
            Override(optimizer, "prepare_grads", self._end_materialize_first),
            Override(optimizer, "reload_model_params", self._load),
            Override(optimizer, "load_state_dict", self._load_state_dict),
            Override(optimizer, "state_dict", self._state_dict, is_for_saving=True),
            Override(optimizer, "sharded_state_dict", self._sharded_state_dict, is_for_saving=True),
        ]
        if isinstance(optimizer, MixedPrecisionOptimizer):  # main parameters are copies of the model's
            overrides += [
                Override(optimizer, "_copy_main_params_to_model_params", self._copy_the_rest),
                Override(optimizer, "_copy_model_params_to_main_params", self._copy_one_by_one),
            ]
        if isinstance(optimizer, DistributedOptimizer):
            overrides += [
                Override(optimizer, "load_parameter_state", self._load),
                Override(optimizer, "load_parameter_state_from_dp_zero", self._load),
                Override(optimizer, "save_parameter_state", self._save, is_for_saving=True),
                Override(optimizer, "get_parameter_state_dp_zero", self._save, is_for_saving=True),
            ]
        if scaled_state.scaled_names(optimizer.optimizer):
            overrides += [
                Override(optimizer.optimizer, method, handler, is_for_saving=True, reads_host=True)
                for method, handler in (("get_unscaled_state", self._unscaled), ("set_scaled_state", self._set_scaled))
            ]
        # A chained optimizer calls some checkpoint methods directly, so each is listed.
        self.overrides = tuple(overrides)

    def install(self) -> None:
        """Replace all methods of ``overrides``, or none and raise a ``UsageError`` if this Megatron lacks one."""
        # A renamed method would read offloaded state.
        for override in self.overrides:
            if not hasattr(override.owner, override.method):
                raise UsageError(
                    f"--swap-optimizer replaces {type(override.owner).__name__}.{override.method}, which the installed "
                    "megatron-core lacks. Install the version in requirements.txt, or leave --swap-optimizer out."
                )
        for override in self.overrides:
            original = getattr(override.owner, override.method)
            self._replaced.append((override, vars(override.owner).get(override.method, _MISSING)))
            setattr(override.owner, override.method, _bound(override, original))

    def remove(self, stays: Callable[[Override], bool] = lambda _: False) -> None:
        """Restore the methods as before ``install``, but those that ``stays`` names. State is not moved."""
        for override, previous in self._replaced:
            if stays(override):
                continue
            if previous is _MISSING:
                delattr(override.owner, override.method)
            else:
                setattr(override.owner, override.method, previous)
        self._replaced = [entry for entry in self._replaced if stays(entry[0])]

    def sizes_to_create(self) -> list[int]:
        """Return the sizes in bytes of the moments that the first step of each parameter is going to create."""
        kinds = type(self._optimizer.optimizer).__mro__
        number = max(NUM_MOMENTS.get(kind.__name__, 0) for kind in kinds)
        new = [one.param for one in self.stepper.state.param_states if not one.moments] if number else []
        return [MOMENT_BYTES * param.numel() for param in new] * number

    def requantized_bytes(self) -> int:
        """Return the bytes of offloaded main parameters that come back behind each step, for parameters in 8 bits."""
        if not has_quantized_params(self._optimizer):
            return 0
        mains = quantized_params.main_params_of_quantized(self._optimizer)
        offloaded = (self.stepper.state.offloaded.get(main) for main in mains)
        return sum(one.tensors[MAIN].num_bytes for one in offloaded if one is not None and MAIN in one.tensors)

    # ----------------------------------------------------------------- training

    def _step(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self.stepper.step(*arguments, **options)

    def _end_materialize_first(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """End materialization before Megatron gives main parameters their gradients on the device."""
        self.stepper.end_materialize()
        return original(*arguments, **options)

    def _copy_the_rest(self, original: Callable[..., Any]) -> None:
        """Copy to the model only its 8-bit parameters: buckets copied the others before they were offloaded again."""
        if has_quantized_params(self._optimizer):
            quantized_params.quantize_params(self._optimizer, self.stepper)

    def _copy_one_by_one(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Copy the model's parameters to the main ones one at a time, which gives the same bits."""
        # With `_dummy_overflow_buf` (fp16) one kernel copies all parameters. That kernel cannot access host memory.
        buffer, self._optimizer._dummy_overflow_buf = self._optimizer._dummy_overflow_buf, None
        try:
            return original(*arguments, **options)
        finally:
            self._optimizer._dummy_overflow_buf = buffer

    # -------------------------------------------------------------- checkpoints

    def _save(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.stepper.materialize()
        return original(*arguments, **options)

    def _state_dict(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Save the state."""
        inner = self._optimizer.optimizer
        if not isinstance(self._optimizer, DistributedOptimizer) or "state_dict" in vars(inner):
            return self._save(original, *arguments, **options)
        # A distributed optimizer drops the inner one's values, which TransformerEngine would copy to fp32.
        with _with_methods(inner, state_dict=torch.optim.Optimizer.state_dict):
            return self._save(original, *arguments, **options)

    def _unscaled(self, original: Callable[..., Any], param: Any, name: str, *given: Any, **options: Any) -> Any:
        """Return a state for a checkpoint."""
        inner, state = self._optimizer.optimizer, self.stepper.state
        if name not in scaled_state.scaled_names(inner) or not state.is_materialized:
            return original(param, name, *given, **options)
        # Copies in fp32 of what is kept on the device would take more memory there than its state.
        with state.on_device(param, name):
            # Kernels and scales are the device's, offloaded values are in host memory.
            return original(param, name, *given, **options).cpu()

    def _set_scaled(self, original: Callable[..., Any], param: Any, name: str, *given: Any, **options: Any) -> None:
        inner, state = self._optimizer.optimizer, self.stepper.state
        is_there = name in inner.state[param] and state.is_in_host(param, name)
        if name not in scaled_state.scaled_names(inner) or not is_there:
            original(param, name, *given, **options)
            return
        with state.on_device(param, name, writes=True):
            original(param, name, *given, **options)

    def _load(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.stepper.materialize()
        try:
            return original(*arguments, **options)
        finally:
            self.stepper.store_loaded()

    def _load_state_dict(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Load the state. Values of the precision-aware optimizer come afterwards, one parameter at a time."""
        self._materialize_for_load()
        methods: dict[str, Callable[..., Any]] = {}
        # Megatron would first load the existing values, all on the device and with copies in fp32.
        if self._optimizer.config.use_precision_aware_optimizer:
            methods = {"state_dict": torch.optim.Optimizer.state_dict, "load_state_dict": _load_settings}
        try:
            with _with_methods(self._optimizer.optimizer, **methods):
                return original(*arguments, **options)
        finally:
            self.stepper.store_loaded()

    def _sharded_state_dict(
        self, original: Callable[..., Any], model: Any, is_loading: bool = False, *arguments: Any, **options: Any
    ) -> Any:
        if is_loading:
            self._materialize_for_load()
        else:
            self.stepper.materialize()
        return original(model, is_loading, *arguments, **options)

    def _materialize_for_load(self) -> None:
        """Allocate host memory for state that is loaded before the first step. Megatron would use the device's."""
        if self._optimizer.config.use_precision_aware_optimizer:
            self.stepper.materialize()
            scaled_state.create_missing(self._optimizer.optimizer, self.stepper.state)
        self.stepper.materialize_for_load()
        if self._optimizer.init_state_fn is not None:
            self._optimizer.init_state_fn(self._optimizer.optimizer, self._optimizer.config)


@contextmanager
def _with_methods(owner: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of ``owner`` for a while."""
    for name, method in methods.items():
        setattr(owner, name, types.MethodType(method, owner))
    try:
        yield
    finally:
        for name in methods:
            delattr(owner, name)


def _load_settings(inner: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load the settings of parameter groups, not the state."""
    for group, loaded in zip(inner.param_groups, state_dict["param_groups"], strict=True):
        group.update({name: value for name, value in loaded.items() if name != "params"})


def _bound(override: Override, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler as a method of its owner: learning-rate schedulers of torch look for its function."""

    @functools.wraps(original)
    def replaced(_: Any, *arguments: Any, **options: Any) -> Any:
        return override.handler(original, *arguments, **options)

    return types.MethodType(replaced, override.owner)


def unchained(optimizer: Any) -> Iterator[Any]:
    """Yield the parts of a ``MegatronOptimizer`` that have an inner optimizer and parameters to step."""
    if isinstance(optimizer, ChainedOptimizer):
        for one in optimizer.chained_optimizers:
            yield from unchained(one)
    elif optimizer.optimizer is not None and not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def stepped_params(optimizer: Any) -> list[torch.Tensor]:
    """Return the model's parameters that ``optimizer`` steps: none if its class does not tell."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return params_of(optimizer)
    found: list[torch.Tensor] = []
    for one in unchained(optimizer) if isinstance(optimizer, MegatronOptimizer) else ():
        if isinstance(one, DistributedOptimizer):
            found += one.model_param_gbuf_map
        elif isinstance(one, Float16OptimizerWithFloat16Params):
            found += (param for group in (*one.float16_groups, *one.fp32_from_fp32_groups) for param in group)
        elif isinstance(one, FP32Optimizer):
            found += stepped_params(one.optimizer)
        else:
            return []
    return found


def main_params_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield main parameters that are copies, in order of creation, or raise a ``UsageError`` for foreign optimizers."""
    if not isinstance(optimizer, MegatronOptimizer):
        raise UsageError(
            f"--swap-optimizer: {type(optimizer).__name__} is not an optimizer of Megatron, whose state alone can be "
            "offloaded. Pass what get_megatron_optimizer returns, or leave the setting out."
        )
    for one in unchained(optimizer):
        groups: Sequence[Sequence[torch.Tensor | None]] = ()
        if isinstance(one, Float16OptimizerWithFloat16Params):
            groups = one.fp32_from_float16_groups
        elif isinstance(one, DistributedOptimizer):
            groups = one.shard_fp32_from_float16_groups
        yield from (param for group in groups for param in group if param is not None)


def is_elementwise(inner: torch.optim.Optimizer, *, has_disk: bool) -> bool:
    """Return whether ``inner`` may step slices, or raise a ``UsageError``: unknown, or whole parameters with a disk."""
    scaled = scaled_state.scaled_names(inner)
    if type(inner).__name__ in ELEMENTWISE and not scaled:
        return True
    if not scaled and not PARAMETERWISE & {kind.__name__ for kind in type(inner).__mro__}:
        known = ", ".join([*sorted(ELEMENTWISE), *(f"{name} and its kinds" for name in sorted(PARAMETERWISE))])
        raise UsageError(
            f"--swap-optimizer: it is not known whether {type(inner).__name__} steps each parameter alone, as those "
            f"do: {known}. Leave --swap-optimizer out, or choose another --optimizer."
        )
    if has_disk and scaled:
        raise UsageError(
            f"--swap-disk-dir: {', '.join(scaled)} of {type(inner).__name__} are kept in fp16 or 8 bits, with a scale "
            "for each parameter. Its parameters are stepped whole, and do not pass through buffers between disk and "
            "device. Leave --swap-disk-dir out, or choose bf16 or fp32."
        )
    if has_disk:
        raise UsageError(
            f"--swap-disk-dir: {type(inner).__name__} steps whole parameters, which do not pass through buffers "
            f"between disk and device. Leave --swap-disk-dir out, or take one of {', '.join(sorted(ELEMENTWISE))}."
        )
    return False


def tables_of(inner: torch.optim.Optimizer) -> list[Table]:
    """Return tables by parameter that ``inner`` has beside its state: scales of moments in TransformerEngine's Adam."""
    scales = getattr(inner, SCALES, None)
    return [scales] if isinstance(scales, dict) else []


def copier_to_model(optimizer: Any) -> OnUpdated:
    """Return a function that copies new main values to the model, or raise a ``UsageError`` for an unknown class."""
    groups: Sequence[tuple[Any, Any]]  # main parameters, and those of the model
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        groups = [(optimizer.fp32_from_float16_groups, optimizer.float16_groups)]
    elif isinstance(optimizer, DistributedOptimizer):
        groups = [
            (optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups),
            (optimizer.shard_fp32_groups, optimizer.model_fp32_groups),
        ]
    elif isinstance(optimizer, FP32Optimizer):
        return lambda *_: None  # the parameters are the model's own
    else:
        raise UsageError(
            f"--swap-optimizer knows Megatron's fp32, fp16, bf16 and distributed optimizers; this run has a "
            f"{type(optimizer).__name__}. Leave --swap-optimizer out."
        )
    left_out = set(map(id, quantized_params.quantized_params(optimizer))) if has_quantized_params(optimizer) else ()
    of_main = {
        main: model
        for group in groups for mains, models in zip(*group, strict=True)
        for main, model in zip(mains, models, strict=True) if main is not None and id(model) not in left_out
    }  # fmt: skip

    def copy(main: torch.Tensor, start: int, stop: int, values: torch.Tensor) -> None:
        if (model := of_main.get(main)) is not None:  # else the parameter is the model's own
            _flat_values(optimizer, model)[start:stop].copy_(values.view(-1))

    return copy


def _flat_values(optimizer: Any, model: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter of the model, of which a distributed optimizer has a part."""
    if not isinstance(optimizer, DistributedOptimizer):
        return model.detach().view(-1)
    place = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
    buffer, _, bucket = optimizer.model_param_gbuf_map[model]
    whole: torch.Tensor = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
    return whole[place.start : place.end]

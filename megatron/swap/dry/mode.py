"""Runs PyTorch on the dry device: every operator advances its clock, and every new storage counts as its memory."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.swap.common.types import MIB, UsageError
from megatron.swap.devices.dry import DryDevice
from megatron.swap.dry.costs import ALLOCATING, HOST_MS, cost_of, touched_bytes
from megatron.swap.engine.overrides import in_backward
from megatron.swap.forecast.gpus import Gpu
from megatron.swap.operators.kinds import PRODUCTS, tensors_in

MOST_KNOWN = 2**22  # elements of the largest tensor whose values are computed
WIDEST_HEAD = 256  # of flash attention
# cuBLAS's workspace on Hopper, which PyTorch's allocator holds. Each thread has a workspace from its first product on:
# forward's thread, and the thread in which autograd runs backward.
CUBLAS_BYTES = 32 * MIB
META = torch.device("meta")
aten = torch.ops.aten
ADD, ADD_IN_PLACE = aten.add.Tensor, aten.add_.Tensor


@contextmanager
def dry_run(device: DryDevice, gpu: Gpu) -> Iterator[None]:
    """Return a context in which operators on the meta device cost on ``device`` as much as on ``gpu``."""
    with _fused_kernels(), _PricedOperators(device, gpu):
        yield


class _PricedOperators(TorchDispatchMode):
    """Prices every operator, backward's too. Computes integers that depend on shapes alone (positions, masks).

    Models ask for such values: whether positions count up, so that attention needs no mask. Values that depend on
    tokens or weights do not exist, and asking for such a value is an error.
    """

    def __init__(self, device: DryDevice, gpu: Gpu) -> None:
        super().__init__()
        self._device = device
        self._gpu = gpu
        self._known = WeakTensorKeyDictionary()
        self._has_workspace = {False: False, True: False}  # of cuBLAS, in backward or not
        self._held_alone = _holders_of_a_sum()
        self._outcomes: dict[tuple[Any, ...], _Outcome | None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ADD and in_backward() and _is_alike(*args[:2]) and _holders(args[0]) == self._held_alone:
            func = ADD_IN_PLACE  # without a mode autograd adds gradients in place
        kwargs = kwargs or {}
        inputs = list(tensors_in([args, kwargs]))
        if func is aten._local_scalar_dense.default and inputs[0].device == META:
            return self._value_of(inputs[0])
        result = self._result(func, args, kwargs)
        seen = [tensor for tensor in (*inputs, *tensors_in(result)) if tensor.device == META]
        if seen:
            self._learn(func, args, kwargs, inputs, result)
            cost = cost_of(func, args, kwargs, result, self._gpu)
            for tensor in seen:  # tensors made before the run are seen as inputs
                self._device.hold(tensor.untyped_storage())
            if func.overloadpacket in PRODUCTS and not self._has_workspace[in_backward()]:
                self._has_workspace[in_backward()] = True
                self._device.take(CUBLAS_BYTES)
            # Autograd detaches the outputs that it saves. Operators see that only where there is a mode.
            host_ms = 0.0 if in_backward() or func is aten.detach.default else HOST_MS
            self._device.run(cost.ms, cost.workspace_bytes, host_ms)
        return result

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # PyTorch finds the result's form in Python, which takes long. Layers and steps repeat, so forms are remembered.
        if not _makes_new_tensors(func):
            return func(*args, **kwargs)
        call = func, _described(args), _described(kwargs), torch.get_default_dtype()
        if call not in self._outcomes:
            result = func(*args, **kwargs)
            self._outcomes[call] = _outcome_of(result, list(tensors_in([args, kwargs])))
            return result
        outcome = self._outcomes[call]
        if outcome is None:
            return func(*args, **kwargs)
        made = [torch.empty_strided(*form, dtype=dtype, device=META) for *form, dtype in outcome.forms]
        return made[0] if outcome.is_single else tuple(made)

    def _learn(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor], result: Any
    ) -> None:
        """Compute the values of ``result``, if they follow from known values."""
        if func._schema.is_mutable:
            if any(tensor in self._known for tensor in inputs):
                self._known.clear()  # views of the changed tensor are among them
            return
        is_whole = isinstance(result, torch.Tensor) and not (result.is_floating_point() or result.is_complex())
        is_random = torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket in ALLOCATING
        if not is_whole or is_random or result.numel() > MOST_KNOWN:
            return
        if all(tensor in self._known or tensor.device.type == "cpu" for tensor in inputs):
            leaves, structure = _pytree.tree_flatten((args, kwargs))
            args, kwargs = _pytree.tree_unflatten([self._on_cpu(leaf) for leaf in leaves], structure)
            self._known[result] = func(*args, **kwargs)

    def _on_cpu(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._known.get(leaf, leaf)
        return torch.device("cpu") if leaf == META else leaf

    def _value_of(self, tensor: torch.Tensor) -> Any:
        if tensor not in self._known:
            raise UsageError(
                "the model asks for the value of a tensor, which depends on its tokens or weights, so that its "
                "operators do not follow from shapes. Train it with swap.activations(model, memory_gib=…), which "
                "measures its steps."
            )
        return self._known[tensor].item()


@dataclass(frozen=True)
class _Outcome:
    """Forms of the tensors that a call of an operator makes: size, strides and type of each."""

    forms: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    is_single: bool


@cache
def _makes_new_tensors(func: Any) -> bool:
    """Whether ``func``, by its schema, returns tensors alone, none a view of its arguments, and changes nothing."""
    schema = func._schema
    is_pure = not any(each.alias_info for each in (*schema.arguments, *schema.returns))
    return is_pure and bool(schema.returns) and all(str(each.type) == "Tensor" for each in schema.returns)


def _described(value: Any) -> Any:
    """Return the part of an argument that decides the form of a result, hashable."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape, value.stride(), value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(each)) for name, each in value.items())
    return type(value), value  # 1 and 1.0 are equal, and their results are not


def _outcome_of(result: Any, inputs: list[torch.Tensor]) -> _Outcome | None:
    """Return ``result`` as an outcome; ``None`` unless each is a plain meta tensor that fills its own storage."""
    # aten._unsafe_view returns a tensor that shares a storage, whatever its schema says.
    made, is_single = list(tensors_in(result)), isinstance(result, torch.Tensor)
    storages, given = ({each.untyped_storage()._cdata for each in tensors} for tensors in (made, inputs))
    is_own = len(storages) == len(made) and not storages & given
    is_filled = all(touched_bytes(tensor) == tensor.untyped_storage().nbytes() for tensor in made)
    is_on_meta = all(tensor.device == META for tensor in (*made, *inputs))
    is_plain = all(type(tensor) is torch.Tensor for tensor in made) and (is_single or len(made) == len(result))
    if not (is_own and is_filled and is_on_meta and is_plain):
        return None
    return _Outcome(tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in made), is_single)


def _is_alike(tensor: Any, other: Any) -> bool:
    """Whether autograd may add gradients in place: both have the same form, and the sum is not differentiated."""
    if not (isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor)) or torch.is_grad_enabled():
        return False
    return tensor.shape == other.shape and tensor.dtype is other.dtype and touched_bytes(tensor) == tensor.nbytes


def _holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the numbers of references to ``tensor``, which a mode was given: in C++, to its storage, in Python."""
    in_cpp: int = tensor._use_count()  # type: ignore[attr-defined]
    return in_cpp, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata), sys.getrefcount(tensor)


class _Holders(TorchDispatchMode):
    """Looks at the first gradient of a sum of gradients."""

    found: tuple[int, int, int] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ADD and in_backward():
            self.found = _holders(args[0])
        return func(*args, **(kwargs or {}))


def _holders_of_a_sum() -> tuple[int, int, int] | None:
    """Return the ``_holders`` of a gradient that only autograd has, as it adds another gradient to it."""
    tensor = torch.empty(2, device=META, requires_grad=True)
    holders = _Holders()
    with torch.enable_grad(), holders:
        twice = tensor * 2
        (twice.sin() + twice.cos()).sum().backward()
    return holders.found


@contextmanager
def _fused_kernels() -> Iterator[None]:
    """Return a context in which attention and dropout on the meta device call the kernels of a GPU."""
    # They are not fused on the meta device, and would come in parts. Registered below all Python, so that every caller
    # gets them, in backward too.
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attend, "AutogradMeta")
    library.impl("dropout", _drop_out, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def _drop_out(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    # A GPU's kernel saves a mask of one byte an element.
    return aten.native_dropout(tensor, p, True)[0] if train and p else tensor


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return attention over [batch, heads, tokens, width] by the kernel that a GPU takes."""
    # Without a mask, in 16 bits and for heads of one width: cuDNN's or flash attention. Both save queries, keys,
    # values, output and the logarithm of its sums. Otherwise the memory-efficient kernel, which saves the mask too.
    is_usual = query.shape[3] == value.shape[3] <= WIDEST_HEAD and query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and is_usual:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if key.shape[1] < query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]

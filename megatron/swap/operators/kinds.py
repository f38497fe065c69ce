"""Kinds of operators of PyTorch's dispatcher, by their schemas and tags, and whether they may run again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch

from megatron.swap.common.types import LINEAR, OPERATOR

aten = torch.ops.aten
# Operators beside those with one of CHEAP_TAGS. They read and write memory, and multiply no matrices.
CHEAP = {
    aten._fused_rms_norm, aten._log_softmax, aten._softmax, aten._to_copy, aten.cat, aten.clone, aten.index_select,
    aten.native_group_norm, aten.native_layer_norm, aten.stack,
}  # fmt: skip
PRODUCTS = {aten.addmm, aten.baddbmm, aten.bmm, aten.mm}
# Not deterministic on a GPU: https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html.
ATOMICS = {
    aten._embedding_bag, aten._index_put_impl_, aten.bincount, aten.cumsum, aten.histc, aten.index_add, aten.index_add_,
    aten.index_put, aten.index_put_, aten.index_reduce, aten.index_reduce_, aten.put, aten.put_, aten.scatter_add,
    aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_,
}  # fmt: skip
CHEAP_TAGS = {torch.Tag.pointwise, torch.Tag.reduction}
UNREPEATABLE_TAGS = {
    torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise, torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}  # fmt: skip


class Kind(Enum):
    """Kinds of operators, by their effect."""

    IGNORED = auto()  # returns a view
    WRITES = auto()  # changes its arguments
    CHEAP = auto()  # only reads and writes memory, and may run again
    PRODUCT = auto()  # multiplies matrices, and may run again
    OTHER = auto()


def producer_of(func: Any) -> str:
    """Return the kind of the outputs of ``func``, as a producer."""
    return LINEAR if kind_of(func) is Kind.PRODUCT else OPERATOR


REPEATABLE = (Kind.CHEAP, Kind.PRODUCT)


def kind_of(func: Any) -> Kind:
    """Return the kind of operator ``func``."""
    known = _KINDS.get(id(func))  # operators compute their hash in Python
    if known is None or known[0] is not func:
        known = _KINDS[id(func)] = func, _kind_of(func)
    return known[1]


_KINDS: dict[int, tuple[Any, Kind]] = {}


def _kind_of(func: Any) -> Kind:
    schema, tags = func._schema, set(func.tags)
    if schema.is_mutable:
        return Kind.WRITES
    if any(one.alias_info is not None for one in schema.returns):
        return Kind.IGNORED
    if func.overloadpacket in PRODUCTS:
        return Kind.PRODUCT
    is_cheap = func.overloadpacket in CHEAP or bool(tags & CHEAP_TAGS)
    return Kind.CHEAP if is_cheap and not tags & UNREPEATABLE_TAGS else Kind.OTHER


def has_atomics(operators: Iterable[Any]) -> bool:
    """Whether results of ``operators`` may differ in their last bits on a GPU."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    return any(func.overloadpacket in ATOMICS for func in operators)


def written(func: Any, args: Sequence[Any], options: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that ``func``, called with these arguments, changes in place."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[place] if place < len(args) else options.get(argument.name))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``, in tuples, lists and mappings of any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))

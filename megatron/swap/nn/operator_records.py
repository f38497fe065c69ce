"""Records how a layer's operators made their outputs, so that backward can make them again.

While a layer runs, every operator of PyTorch's dispatcher passes ``OperatorRecords``. Outputs of elementwise operators,
reductions, norms and copies are recorded with the operator and its inputs (``engine/recompute.py``): where autograd
saves such an output, a plan may have it computed again instead of kept. No model is known by name: a norm or a rotary
embedding that a model writes out in single operators is recomputed operator by operator, as far as they are saved.
Whether an operator gives the same bits again is tried at its first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum, auto
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.swap.common.site_paths import SOURCE_PATH
from megatron.swap.common.types import LINEAR, OPERATOR, Site
from megatron.swap.engine.producer_records import of_tensors_alone
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.nn.module_boundary import tensors_in

aten = torch.ops.aten
CHEAP = {
    aten._fused_rms_norm, aten._log_softmax, aten._softmax, aten._to_copy, aten.cat, aten.clone, aten.index_select,
    aten.native_group_norm, aten.native_layer_norm, aten.stack,
}  # fmt: skip
"""Operators beside those with one of ``CHEAP_TAGS``. They read and write memory, and multiply no matrices."""
PRODUCTS = {aten.addmm, aten.baddbmm, aten.bmm, aten.mm}
ALLOCATING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Operators that the engine calls, too: they are not counted."""
CHEAP_TAGS = {torch.Tag.pointwise, torch.Tag.reduction}
UNREPEATABLE_TAGS = {
    torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise, torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}  # fmt: skip


class _NumberedOutputs(TorchDispatchMode):
    """Numbers the storages that operators of this thread make while active, in their order.

    Args:
        recomputer: is told while the mode is active, so that operators of its own do not pass.
        wanted: numbers of the outputs that matter; ``None``: all.

    Attributes:
        num_outputs: outputs so far.
    """

    def __init__(self, recomputer: Recomputer, wanted: Collection[int] | None = None) -> None:
        super().__init__()
        self._recomputer = recomputer
        self._wanted = wanted
        self.num_outputs = 0
        self._numbers: dict[int, int] = {}  # by the addresses of storages
        self._made_storages: list[StorageWeakRef] = []  # until the end, so that no address is used again

    def __enter__(self) -> Self:
        self._recomputer.is_watched = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._recomputer.is_watched = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return that PyTorch need not disable its compiler for each operator: the layer's boundary does for all."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        kind = kind_of(func)
        if kind is Kind.IGNORED:
            return result
        if kind is Kind.WRITES:
            for tensor in written(func, args, options):
                self._changed(tensor.untyped_storage()._cdata)
            return result
        first, wanted = self.num_outputs, self._wanted
        outputs = [result] if isinstance(result, torch.Tensor) else list(tensors_in(result))
        self.num_outputs += len(outputs)
        if wanted is not None and not any(number in wanted for number in range(first, self.num_outputs)):
            return result
        for number, tensor in enumerate(outputs, start=first):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._numbers:  # else the operator returns another shape of an output
                self._numbers[storage._cdata] = number
                self._made_storages.append(StorageWeakRef(storage))
                self._made(storage._cdata, number)
        if kind in REPEATABLE:
            self._repeatable(func, args, options, result)
        return result

    def _made(self, address: int, number: int) -> None:
        """An operator has made storage ``number``, which lives at ``address``."""

    def _changed(self, address: int) -> None:
        """An operator has changed the storage at ``address``."""

    def _repeatable(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """An operator has run that may run again."""


class OperatorWatch(_NumberedOutputs):
    """Finds outputs that the layer changes in place later, before any is recorded.

    Such an output cannot be read again in backward. With the layer's next run it is too late to find that out: what it
    would have been read for is not kept any more.

    Attributes:
        changed: the numbers of these outputs.
    """

    def __init__(self, recomputer: Recomputer) -> None:
        super().__init__(recomputer)
        self.changed: set[int] = set()

    def _changed(self, address: int) -> None:
        if address in self._numbers:
            self.changed.add(self._numbers[address])


class OperatorRecords(_NumberedOutputs):
    """Records the outputs of operators of this thread that may run again.

    Args:
        recomputer: receives the records.
        layer: number of the layer that runs.
        sources: gets a site for the output of each operator, by the address of its storage; ``None`` if the layer
            changes it.
        changed: numbers of outputs that the layer changes in place: these are neither recorded nor read again.
        wanted: numbers of outputs to record, and of those that they are made from; ``None``: all. Recording one takes
            the host longer than running its operator.
    """

    def __init__(
        self,
        recomputer: Recomputer,
        layer: int,
        sources: dict[int, Site | None],
        changed: Collection[int],
        wanted: Collection[int] | None = None,
    ) -> None:
        super().__init__(recomputer, wanted)
        self._layer = layer
        self._sources = sources
        self._left_out = changed

    def numbers(self, addresses: Collection[int]) -> frozenset[int]:
        """Return the numbers of those outputs that live, or lived, at ``addresses``."""
        return frozenset(self._numbers[address] for address in addresses if address in self._numbers)

    def _made(self, address: int, number: int) -> None:
        self._sources[address] = None if number in self._left_out else Site(self._layer, SOURCE_PATH, number)

    def _changed(self, address: int) -> None:
        self._sources[address] = None  # an input of the layer, or the layer runs other operators than before

    def _repeatable(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        again, inputs = of_tensors(func, args, options)
        producer = LINEAR if kind_of(func) is Kind.PRODUCT else OPERATOR
        with _with_versions():
            if isinstance(result, torch.Tensor):
                self._record_part(producer, again, inputs, result)
                return
            for number, part in enumerate(result):  # a norm's output, and its statistics
                if isinstance(part, torch.Tensor):
                    self._record_part(producer, _part(again, number), inputs, part)

    def _record_part(
        self, producer: str, again: Callable[..., Any], inputs: list[torch.Tensor], output: torch.Tensor
    ) -> None:
        if self._sources.get(output.untyped_storage()._cdata) is not None:
            self._recomputer.record(producer, again, inputs, {}, output)


def written(func: Any, args: Sequence[Any], options: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that ``func``, called with these arguments, changes in place."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[place] if place < len(args) else options.get(argument.name))


class Kind(Enum):
    """What an operator does."""

    IGNORED = auto()
    """It returns a view, or memory without values."""
    WRITES = auto()
    """It changes its arguments."""
    CHEAP = auto()
    """It only reads and writes memory, and may run again."""
    PRODUCT = auto()
    """It multiplies matrices, and may run again."""
    OTHER = auto()


REPEATABLE = (Kind.CHEAP, Kind.PRODUCT)


@functools.cache
def kind_of(func: Any) -> Kind:
    """Return what the operator ``func`` does."""
    schema, tags = func._schema, set(func.tags)
    if schema.is_mutable:
        return Kind.WRITES
    if func.overloadpacket in ALLOCATING or any(one.alias_info is not None for one in schema.returns):
        return Kind.IGNORED
    if func.overloadpacket in PRODUCTS:
        return Kind.PRODUCT
    is_cheap = func.overloadpacket in CHEAP or bool(tags & CHEAP_TAGS)
    return Kind.CHEAP if is_cheap and not tags & UNREPEATABLE_TAGS else Kind.OTHER


def of_tensors(
    func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Bind all arguments of ``func`` but its tensors, those in lists among them. Return function and tensors."""
    if not any(type(one) in (list, tuple) and any(map(_is_tensor, one)) for one in (*args, *options.values())):
        return of_tensors_alone(func, args, options)
    leaves, structure = _pytree.tree_flatten([list(args), options])
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None

    def again(*given: torch.Tensor) -> Any:
        full = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            full[place] = tensor
        again_args, again_options = _pytree.tree_unflatten(full, structure)
        return func(*again_args, **again_options)

    return again, tensors


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _part(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    return lambda *given: function(*given)[number]


def _with_versions() -> Any:
    """Return a context in which ``detach`` shares the version counter, by which changes in place are seen.

    Below autograd, where a mode runs, PyTorch leaves out the key that makes views share it.
    """
    without_views = torch._C._dispatch_tls_local_exclude_set()
    views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), without_views - views)

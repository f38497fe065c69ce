"""Records how a layer's operators made their outputs, so that backward can make them again.

While a layer runs, every operator of PyTorch's dispatcher passes ``OperatorRecords``. Outputs of elementwise operators,
reductions, norms and copies are recorded with the operator and its inputs (``engine/recompute.py``). A plan may let
backward compute a saved output again instead of keeping it. No model is known by name: a norm written out in single
operators is recomputed operator by operator. The first use of each operator shows whether it gives the same bits again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from megatron.swap.common.site_paths import SOURCE_PATH
from megatron.swap.common.types import Site
from megatron.swap.devices.plain_tensors import is_plain
from megatron.swap.engine.producer_records import of_tensors_alone
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.run_prints import SEED_BYTES
from megatron.swap.native.operator_following import Following
from megatron.swap.operators.compared import Compared, Flow, Saved, compared
from megatron.swap.operators.following import followed, uncompiled
from megatron.swap.operators.kinds import REPEATABLE, Kind, kind_of, producer_of, tensors_in, written

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class OperatorOrder:
    """The operators of a layer's run, and when it writes to which storage.

    Outputs have numbers from 0. Storages from before have numbers below 0, in the order of their first use.
    """

    operators: list[Any] = field(default_factory=list)  # in their order, without operators that only return views
    shapes: list[tuple[Any, ...]] = field(default_factory=list)  # of each operator's results
    firsts: list[int] = field(default_factory=list)  # number of each operator's first output
    # Position of the last operator that writes to a storage, by the storage's number. Infinite if the model writes
    # after the layer.
    last_write: dict[int, float] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)  # positions of operators that were recorded when all were wanted
    num_modes: int = 0  # active dispatch modes around the layer; with others operators may do something different
    compared: Compared | None = None  # saved tensors that are compared if the layer runs again
    # Whether each tensor that the layer may read needs a gradient. With other needs the layer saves other tensors.
    needs: tuple[bool, ...] = ()

    def position(self, number: int) -> int:
        """Return the position of the operator that makes output ``number``."""
        return bisect_right(self.firsts, number) - 1


class Operators:
    """A context that sees this thread's operators, once each has run. The layer may read or change ``tensors``."""

    sequence: object | None = None  # the expected operators, if only some of them are to be seen

    def __init__(self, recomputer: Recomputer, tensors: Iterable[torch.Tensor]) -> None:
        self.saw_all = self.is_as_expected = False  # of `Following`, after the end
        self._recomputer = recomputer
        self._outer: Callable[[], AbstractContextManager[None]] | None = None
        self._followed: Following | None = None
        self._num_before = 0
        self._numbers: dict[int, int] = {}  # by the addresses of storages
        self._made: list[StorageWeakRef] = []  # until the end, so that no address is used again
        for tensor in tensors:
            self.number(tensor)

    def ran(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """See an operator. An operator of ``sequence`` is named by its position."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._followed = followed(self.ran, self.sequence)
        self._outer, self._recomputer.unwatched = self._recomputer.unwatched, self._followed.unseen
        self._followed.begin()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._followed is not None
        self._followed.end()
        self.saw_all, self.is_as_expected = self._followed.saw_all, self._followed.is_as_expected
        self._followed = None  # which refers to this object
        self._recomputer.unwatched = self._outer

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the storage of ``tensor``; ``None`` if it has no storage."""
        if not is_plain(tensor):
            return None
        address = tensor.untyped_storage()._cdata
        if address not in self._numbers:
            self._num_before += 1
            self._numbers[address] = -self._num_before
        return self._numbers[address]

    def _make(self, tensor: torch.Tensor, number: int) -> bool:
        """Number the storage of ``tensor``, an operator's output. Return whether the storage is new."""
        if not is_plain(tensor):
            return False
        storage = tensor.untyped_storage()
        if storage._cdata in self._numbers:  # the operator returns its input in another shape
            return False
        self._numbers[storage._cdata] = number
        self._made.append(StorageWeakRef(storage))
        return True


class OperatorWatch(Operators):
    """Learns the order of a layer's operators and writes, in a run before any is recorded: its end is too late."""

    def __init__(self, recomputer: Recomputer, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__(recomputer, tensors)
        self.order = OperatorOrder(num_modes=_len_torch_dispatch_stack())
        self._num_outputs = 0
        self._num_given = self._num_before
        self._flows: list[Flow] = []
        self._saved: list[Saved] = []
        self._workspaces: set[int | None] = set()  # bytes that an operator makes beside results

    def saves(self, tensor: torch.Tensor) -> None:
        """See a tensor that autograd saves."""
        number = self.number(tensor)
        layout = () if number is None else (tensor.storage_offset(), tensor.shape, tensor.stride())
        is_seed = not tensor.is_floating_point() and tensor.nbytes <= SEED_BYTES
        self._saved.append(Saved(number, layout, is_seed or number in self._workspaces))

    def end(self) -> OperatorOrder:
        self.order.compared = compared(self._flows, self._saved, self._num_given)
        return self.order

    @uncompiled
    def ran(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        kind, order = kind_of(func), self.order
        if kind is Kind.IGNORED:
            return
        reads = self._sizes((args, options))
        writes = {}
        for tensor in written(func, args, options) if kind is Kind.WRITES else ():
            if (number := self.number(tensor)) is not None:
                writes[number] = tensor.numel()
                order.last_write[number] = len(order.operators)
        order.operators.append(func)
        order.firsts.append(self._num_outputs)
        order.shapes.append(tuple(tensor.shape if is_plain(tensor) else None for tensor in tensors_in(result)))
        for tensor in tensors_in(result):
            self._make(tensor, self._num_outputs)
            self._num_outputs += 1
        self._flows.append(Flow(reads, self._sizes(result) | writes))
        if kind is Kind.OTHER and not isinstance(result, torch.Tensor):
            self._workspaces |= {self.number(one) for one in tensors_in(result) if one.dtype is torch.uint8}

    def _sizes(self, value: Any) -> dict[int, int]:
        """Return the elements of the tensors in ``value``, by the numbers of their storages."""
        numbered = ((self.number(tensor), tensor.numel()) for tensor in tensors_in(value))
        return {number: size for number, size in numbered if number is not None}


class OperatorFollower(Operators):
    """Follows operators along ``order``, which numbers outputs. ``sources`` gets sites for these, by address."""

    def __init__(
        self, recomputer: Recomputer, layer: int, sources: dict[int, Site], order: OperatorOrder,
        tensors: Iterable[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__(recomputer, tensors)
        self._layer = layer
        self._sources = sources
        self._order = order
        self._position = 0
        self._is_other = False

    @property
    def is_as_watched(self) -> bool:
        """Whether the layer has run exactly the operators of the order."""
        return self.saw_all and not self._is_other and self._position == len(self._order.operators)

    def _make_source(self, tensor: torch.Tensor, number: int) -> bool:
        """Number the storage of ``tensor``, and give it a site. Return whether the storage is new."""
        is_new = self._make(tensor, number)
        if is_new:
            self._sources[tensor.untyped_storage()._cdata] = Site(self._layer, SOURCE_PATH, number)
        return is_new


class OperatorRecords(OperatorFollower):
    """Records outputs that may be made again: the ``wanted`` ones and what they are made from, or all if None."""

    def __init__(
        self, recomputer: Recomputer, layer: int, sources: dict[int, Site], order: OperatorOrder,
        tensors: Iterable[torch.Tensor], wanted: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(recomputer, layer, sources, order, tensors)
        # Recording an output takes the host longer than running its operator, so a plan names the wanted outputs.
        self._wanted = None if wanted is None else {order.position(number) for number in wanted}

    def made_at(self, addresses: Collection[int]) -> frozenset[int]:
        """Return the numbers of the outputs that live, or lived, at ``addresses``."""
        return frozenset(self._numbers[one] for one in addresses if self._numbers.get(one, -1) >= 0)

    @uncompiled
    def ran(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        order, position = self._order, self._position
        if self._is_other:
            return
        if position == len(order.operators) or order.operators[position] is not func:
            if kind_of(func) is not Kind.IGNORED:
                self._is_other = True  # its writes are not known: nothing more is recorded
            return
        self._position += 1
        if self._wanted is None:
            self._note_inputs(kind_of(func), args, options)
        elif position not in self._wanted:
            return
        new = []
        tensors = (result,) if isinstance(result, torch.Tensor) else tensors_in(result)
        for number, tensor in enumerate(tensors, start=order.firsts[position]):
            new.append(self._make_source(tensor, number) and order.last_write.get(number, -1) < position)
        if position in order.recorded:
            self._record(func, args, options, result, new)

    def _note_inputs(self, kind: Kind, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Number the operator's inputs. Record it in runs to come if backward can read them: no later write."""
        order, position = self._order, self._position - 1
        numbers = [self.number(tensor) for tensor in tensors_in((args, options))]
        last_writes = [inf if number is None else order.last_write.get(number, -1) for number in numbers]
        if kind in REPEATABLE and max(last_writes, default=inf) <= position:
            order.recorded.add(position)
        else:
            order.recorded.discard(position)

    def _record(
        self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any, is_kept: Sequence[bool]
    ) -> None:
        """Record the outputs of ``func`` with ``is_kept``. A norm has its statistics, too."""
        again, inputs = of_tensors(func, args, options)
        producer = producer_of(func)
        parts = [result] if isinstance(result, torch.Tensor) else list(result)
        kept = iter(is_kept)
        for number, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and next(kept):
                made = again if part is result else part_of(again, number)
                self._recomputer.record_made(producer, made, inputs, part)


def of_tensors(
    func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Bind all arguments of ``func`` but its tensors, in lists too. Return the function and the tensors."""
    tensors, has_lists = [], False
    for one in (*args, *options.values()):
        if isinstance(one, torch.Tensor):
            tensors.append(one)
        elif type(one) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in one):
            has_lists = True
    if len(tensors) == len(args) and not options:
        return func, tensors
    if not has_lists and len(tensors) == 1 and args and args[0] is tensors[0]:  # as most are
        others = args[1:]
        return lambda tensor: func(tensor, *others, **options), tensors
    if not has_lists:
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


def part_of(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return ``function`` with only part ``number`` of its results."""
    return lambda *given: function(*given)[number]

"""Layers that run as they ran before: what an earlier run has decided is repeated (``engine/repeated_run.py``)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.swap.common.site_paths import SOURCE_PATH
from megatron.swap.common.types import Site
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.repeated_run import NotingPacker, RepeatingPacker, RunMemo
from megatron.swap.engine.saved_tensors import LayerPacker
from megatron.swap.native.operator_sequence import Following, Operators, load_operators
from megatron.swap.nn.operator_records import (
    Kind,
    OperatorOrder,
    is_plain,
    keys_with_versions,
    kind_of,
    of_tensors,
    part_of,
    producer_of,
    uncompiled,
)

MAX_OTHERS = 3
"""A run that did not go as noted this often, under one policy, is noted no more."""


class Outputs(NamedTuple):
    """Numbers of those outputs of an operator that are made again, and of those that are saved to make others.

    ``first``: number of its first output; ``producer``: their kind.
    """

    operator: Any
    first: int
    producer: str
    made: tuple[int, ...]
    read: tuple[int, ...]


class OperatorRepeats:
    """A context for a run that repeats an earlier one. Of its operators it records only those that run again in
    backward.

    Args:
        sources: gets sites for outputs of operators, by the addresses of their storages.
        packer: gets the records.
        repeat: what is repeated.

    Attributes:
        is_as_watched: at the end, whether the layer has run the operators of ``repeat``, and no others.
    """

    def __init__(
        self, recomputer: Recomputer, layer: int, sources: dict[int, Site], packer: RepeatingPacker, repeat: Repeat
    ) -> None:
        self.is_as_watched = False
        self._recomputer = recomputer
        self._layer = layer
        self._sources = sources
        self._packer = packer
        self._repeat = repeat
        self._held: list[StorageWeakRef] = []  # until the end, so that no address is used again
        self._keys: tuple[Any, Any] | None = None
        self._outer: Callable[[], AbstractContextManager[None]] | None = None
        self._following: Following | None = None

    def __enter__(self) -> Self:
        operators = self._repeat.operators
        self._outer, self._recomputer.unwatched = self._recomputer.unwatched, operators.Unfollowed
        self._following = operators.Following(self._repeat.sequence, self._record, _is_ignored)
        self._following.begin()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._following is not None
        self._following.end()
        self.is_as_watched = self._following.is_as_expected
        self._following = None  # it refers to this object, which the garbage collector does not see
        self._recomputer.unwatched = self._outer

    @uncompiled
    def _record(self, position: int, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        outputs = self._repeat.outputs[position]
        again, inputs = of_tensors(outputs.operator, args, options)
        if isinstance(result, torch.Tensor):
            self._record_part(outputs, 0, again, inputs, result)
            return
        parts = [(place, part) for place, part in enumerate(result) if isinstance(part, torch.Tensor)]
        for index, (place, part) in enumerate(parts):
            self._record_part(outputs, index, part_of(again, place), inputs, part)

    def _record_part(
        self, outputs: Outputs, index: int, again: Callable[..., Any], inputs: list[torch.Tensor], part: torch.Tensor
    ) -> None:
        number = outputs.first + index
        if number in outputs.made:
            if is_plain(part) and all(map(is_plain, inputs)):
                with self._with_versions():
                    self._packer.record(number, outputs.producer, again, inputs, part)
        elif number in outputs.read and is_plain(part):
            storage = part.untyped_storage()
            self._held.append(StorageWeakRef(storage))
            self._sources[storage._cdata] = Site(self._layer, SOURCE_PATH, number)

    def _with_versions(self) -> AbstractContextManager[Any]:
        """Return a context in which aliases of tensors detect changes in place."""
        if self._keys is None:
            self._keys = keys_with_versions()
        return torch._C._ForceDispatchKeyGuard(*self._keys)


@functools.cache
@uncompiled
def _is_ignored(name: str, overload: str) -> bool:
    """Whether the operator only returns a view."""
    namespace, short = name.split("::")
    operator = getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")
    return kind_of(operator) is Kind.IGNORED


class Repeat(NamedTuple):
    """A memo to repeat.

    Attributes:
        memo: what the run has saved, and what became of it.
        outputs: those of operators, by the positions of the operators in their order.
        operators: follow the run.
        sequence: the operators, in their order.
    """

    memo: RunMemo
    outputs: Mapping[int, Outputs]
    operators: Operators
    sequence: object

    @classmethod
    def of(cls, memo: RunMemo, order: OperatorOrder) -> Repeat | None:
        """Return what a run with the operators of ``order`` repeats; ``None``: they cannot be followed."""
        operators = load_operators()
        schemas = [getattr(one, "_schema", None) for one in order.operators]  # a higher-order operator has none
        names = [(one.name, one.overload_name) for one in schemas if one is not None]
        if operators is None or len(names) < len(schemas):
            return None
        made = memo.made()
        numbers: dict[int, list[int]] = {}
        for number in sorted(made | memo.read):
            numbers.setdefault(order.position(number), []).append(number)
        outputs = {}
        for position, of in numbers.items():
            again, read = (tuple(one for one in of if (one in made) is is_made) for is_made in (True, False))
            operator = order.operators[position]
            outputs[position] = Outputs(operator, order.firsts[position], producer_of(operator), again, read)
        sequence = operators.Sequence(names, [position in outputs for position in range(len(names))])
        return cls(memo, outputs, operators, sequence)


class RepeatedRuns:
    """Memos of a layer's runs under the present policy.

    A run is named by its number in a forward, and by how many runs of the layer came before it.

    Attributes:
        is_repeating: the present run repeats an earlier one.
    """

    def __init__(self) -> None:
        self.is_repeating = False
        self._repeats: dict[tuple[int, int], Repeat] = {}
        self._num_others: Counter[tuple[int, int]] = Counter()
        self._run = (0, 0)
        self._is_noted = False
        self._packer: LayerPacker | None = None

    def begin(self, run: tuple[int, int], is_known: bool) -> None:
        """Begin ``run``.

        Args:
            is_known: its operators are, and which of them are recorded; and nobody watches it.
        """
        self._run = run
        self.is_repeating = is_known and run in self._repeats
        self._is_noted = is_known and not self.is_repeating and self._num_others[run] < MAX_OTHERS

    def packer(self, *arguments: Any) -> LayerPacker:
        """Return what packs the tensors of the run, made of ``arguments``: it repeats, or notes, or does neither."""
        if self.is_repeating:
            self._packer = RepeatingPacker(self._repeats[self._run].memo, *arguments)
        else:
            self._packer = (NotingPacker if self._is_noted else LayerPacker)(*arguments)
        return self._packer

    def recording(self, recomputer: Recomputer, sources: dict[int, Site]) -> OperatorRepeats:
        """Return the context in which the run repeats an earlier one."""
        assert isinstance(self._packer, RepeatingPacker)
        return OperatorRepeats(recomputer, self._run[0], sources, self._packer, self._repeats[self._run])

    def note(self, order: OperatorOrder) -> None:
        """Note what the run has decided, if that can be repeated."""
        memo = self._packer.memo() if isinstance(self._packer, NotingPacker) else None
        repeat = None if memo is None else Repeat.of(memo, order)
        if repeat is not None:
            self._repeats[self._run] = repeat

    def end(self, is_as_watched: bool) -> None:
        """End the run, which has run the operators that were watched, or others."""
        if isinstance(self._packer, RepeatingPacker):
            self._packer.end()
            self._num_others[self._run] += self._packer.is_other and is_as_watched
            is_as_watched &= not self._packer.is_other
        if not is_as_watched:
            self._repeats.pop(self._run, None)

    def drop_packer(self) -> None:
        """Hold nothing of the run, which is over or has failed."""
        self._packer = None

    def clear(self) -> None:
        """Repeat nothing: the policy changes."""
        self._repeats.clear()
        self._num_others.clear()

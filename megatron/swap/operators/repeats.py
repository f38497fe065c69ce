"""Layers that run as before: the decisions of an earlier run are repeated (``engine/repeated_run.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from megatron.swap.common.types import Site
from megatron.swap.devices.plain_tensors import is_plain
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.repeated_run import NotingPacker, RepeatingPacker, RunMemo
from megatron.swap.engine.saved_tensors import LayerPacker
from megatron.swap.operators.following import sequence_of, uncompiled
from megatron.swap.operators.kinds import producer_of
from megatron.swap.operators.records import OperatorFollower, OperatorOrder, of_tensors, part_of

MAX_OTHERS = 3  # a run that differed from its notes this often, under one policy, is noted no more


class Outputs(NamedTuple):
    """Outputs of an operator, by their numbers, that a repeated run records."""

    first: int  # number of the operator's first output
    producer: str  # their kind
    made: tuple[int, ...]  # made again
    read: tuple[int, ...]  # saved to make others


class OperatorRepeats(OperatorFollower):
    """Records the operators of a run that repeats an earlier run: only those that backward runs again."""

    def __init__(
        self, recomputer: Recomputer, layer: int, sources: dict[int, Site], order: OperatorOrder,
        packer: RepeatingPacker, repeat: Repeat,
    ) -> None:  # fmt: skip
        super().__init__(recomputer, layer, sources, order)
        self.sequence = repeat.sequence
        self._packer = packer
        self._outputs = repeat.outputs
        self._operators = order.operators

    @property
    def is_as_watched(self) -> bool:
        return self.is_as_expected

    @uncompiled
    def ran(self, position: int, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        outputs = self._outputs[position]
        again, inputs = of_tensors(self._operators[position], args, options)
        if isinstance(result, torch.Tensor):
            self._repeat_part(outputs, 0, again, inputs, result)
            return
        parts = [(place, part) for place, part in enumerate(result) if isinstance(part, torch.Tensor)]
        for index, (place, part) in enumerate(parts):
            self._repeat_part(outputs, index, part_of(again, place), inputs, part)

    def _repeat_part(
        self, outputs: Outputs, index: int, again: Callable[..., Any], inputs: list[torch.Tensor], part: torch.Tensor
    ) -> None:
        number = outputs.first + index
        if number in outputs.made:
            if is_plain(part) and all(map(is_plain, inputs)):
                self._packer.record(number, outputs.producer, again, inputs, part)
        elif number in outputs.read:
            self._make_source(part, number)


class Repeat(NamedTuple):
    """A memo to repeat."""

    memo: RunMemo
    outputs: Mapping[int, Outputs]  # by the operators' positions in their order
    sequence: object  # the operators in their order

    @classmethod
    def of(cls, memo: RunMemo, order: OperatorOrder) -> Repeat:
        """Return the repeat of ``memo`` for a run with the operators of ``order``."""
        made = memo.made()
        numbers: dict[int, list[int]] = {}
        for number in sorted(made | memo.read):
            numbers.setdefault(order.position(number), []).append(number)
        outputs = {}
        for position, of in numbers.items():
            again, read = (tuple(one for one in of if (one in made) is is_made) for is_made in (True, False))
            outputs[position] = Outputs(order.firsts[position], producer_of(order.operators[position]), again, read)
        return cls(memo, outputs, sequence_of(order.operators, outputs))


class RepeatedRuns:
    """Memos of a layer's runs, by number in a forward and among the layer's runs, under the present policy."""

    def __init__(self) -> None:
        self.is_repeating = False  # the present run repeats an earlier run
        self._repeats: dict[tuple[int, int], Repeat] = {}
        self._num_others: Counter[tuple[int, int]] = Counter()
        self._run = (0, 0)
        self._is_noted = False
        self._packer: LayerPacker | None = None

    def begin(self, run: tuple[int, int], is_known: bool) -> None:
        """Begin ``run``. ``is_known``: its operators are known, those to record too, and they are not watched."""
        self._run = run
        self.is_repeating = is_known and run in self._repeats
        self._is_noted = is_known and not self.is_repeating and self._num_others[run] < MAX_OTHERS

    def packer(self, *arguments: Any) -> LayerPacker:
        """Return the packer of the run's tensors, made of ``arguments``: it repeats, notes, or does neither."""
        if self.is_repeating:
            self._packer = RepeatingPacker(self._repeats[self._run].memo, *arguments)
        else:
            self._packer = (NotingPacker if self._is_noted else LayerPacker)(*arguments)
        return self._packer

    def recording(self, recomputer: Recomputer, sources: dict[int, Site], order: OperatorOrder) -> OperatorRepeats:
        """Return the context in which the run repeats an earlier run."""
        assert isinstance(self._packer, RepeatingPacker)
        return OperatorRepeats(recomputer, self._run[0], sources, order, self._packer, self._repeats[self._run])

    def note(self, order: OperatorOrder) -> None:
        """Note the decisions of the run, if they can be repeated."""
        memo = self._packer.memo() if isinstance(self._packer, NotingPacker) else None
        if memo is not None:
            self._repeats[self._run] = Repeat.of(memo, order)

    def end(self, is_as_watched: bool) -> None:
        """End the run. ``is_as_watched``: it ran the operators that were watched, and no others."""
        if isinstance(self._packer, RepeatingPacker):
            self._packer.end()
            self._num_others[self._run] += self._packer.is_other and is_as_watched
            is_as_watched &= not self._packer.is_other
        if not is_as_watched:
            self._repeats.pop(self._run, None)

    def forget(self, run: tuple[int, int]) -> None:
        self._repeats.pop(run, None)

    def drop_packer(self) -> None:
        """Forget the tensors of the run, which is over or has failed."""
        self._packer = None

    def clear(self) -> None:
        self._repeats.clear()
        self._num_others.clear()

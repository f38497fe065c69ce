"""Repeats the decisions about the tensors that a layer saved in an earlier run.

A decision takes the host longer than enqueueing the kernels of a small layer. A layer that runs the same operators
saves the same tensors in the same order. So one run notes the outcome for each tensor (``NotingPacker``), and later
runs repeat it (``RepeatingPacker``) as long as each tensor has its earlier site.

Versions are checked as before, and so is whether a storage is the output of the operator that recomputes it. From the
first tensor that does not fit, the run decides by itself, and recomputes nothing more. Its earlier entries in the graph
stay valid.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.swap.common.site_paths import SOURCE_PATH
from megatron.swap.common.types import Site
from megatron.swap.engine.decision import Decision
from megatron.swap.engine.handle import Group, alias_of
from megatron.swap.engine.layer_recording import Undecided
from megatron.swap.engine.producer_records import Function, ProducerRecord, version_probe_of
from megatron.swap.engine.recompute import is_cast_automatically
from megatron.swap.engine.recompute_spec import RecomputeSpec
from megatron.swap.engine.saved_tensors import (
    HandledTensor,
    KeptTensor,
    LayerPacker,
    Packed,
    RecomputedTensor,
    Record,
    SavedTensors,
    Where,
    keep,
)


@dataclass(slots=True)
class Step:
    """The outcome for one saved tensor."""

    site: Site | None  # of the tensor; None if it is constant
    is_recomputed: bool = False  # its storage is recomputed
    is_kept: bool = False  # it is kept, and its storage has no handle
    # Which operator output this tensor is, if backward recomputes it from here on. None on later views of that storage,
    # and on storages that are kept or offloaded.
    output: int | None = None
    is_settled: bool = False  # the inputs of `output` have been saved: settle it at once
    # For a handle that is made with this tensor. None if there is one, or the storage is kept.
    decision: Decision | None = None
    num_refused: int = 0  # refusals to recompute it
    # Outputs of earlier steps that are settled before this step: no more of their inputs are saved.
    settled: tuple[int, ...] = ()


@dataclass
class RunMemo:
    """The outcomes for all tensors that a run saved. Outputs of operators are named by their numbers."""

    steps: list[Step] = field(default_factory=list)  # one for each saved tensor
    # For each recomputed output, the unsaved outputs recomputed before it, in order.
    makers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)  # outputs that only recomputation reads, and that are saved for it

    def made(self) -> set[int]:
        """Return the outputs whose operators have to be recorded."""
        return {*self.makers, *(one for makers in self.makers.values() for one in makers)}


class NotingPacker(LayerPacker):
    """Packs a run's tensors, and notes the outcomes. Arguments as for ``LayerPacker``."""

    def __init__(
        self, saved_tensors: SavedTensors, where: Where, constants: Collection[int], sources: Mapping[int, Site]
    ) -> None:
        super().__init__(saved_tensors, where, constants, sources)
        self._counters = saved_tensors.manager.counters
        self._memo = RunMemo()
        self._outputs: dict[RecomputeSpec, int] = {}
        self._pending: list[RecomputeSpec] = []
        self._is_repeatable = True

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Pack ``tensor`` as ever, and note its step."""
        num_steps = len(self._memo.steps)
        packed = super().pack(tensor)
        if len(self._memo.steps) == num_steps:
            self._memo.steps.append(Step(None))
        return packed

    def pack_at(self, tensor: torch.Tensor, group: Group, site: Site) -> Packed:
        """Pack ``tensor`` as ever, and note its step."""
        had_handle = self._offload.find(tensor.untyped_storage()) is not None
        num_refused = self._counters.num_not_recomputed
        packed = super().pack_at(tensor, group, site)
        settled, output, is_settled, decision = self._settled(), None, False, None
        is_recomputed = isinstance(packed, RecomputedTensor)
        if isinstance(packed, RecomputedTensor) and packed.spec.num_packed == 1:
            output = self._outputs.get(packed.spec)
            self._is_repeatable &= output is not None
            self._pending.append(packed.spec)
            is_settled = bool(self._settled())
        elif isinstance(packed, HandledTensor) and not had_handle:
            decision = packed.handle.decision
        num_refused = self._counters.num_not_recomputed - num_refused
        is_kept = isinstance(packed, KeptTensor)
        self._memo.steps.append(Step(site, is_recomputed, is_kept, output, is_settled, decision, num_refused, settled))
        return packed

    def memo(self) -> RunMemo | None:
        """Return the noted outcomes at the end of the run, or None if the run cannot be repeated."""
        self._settled()
        return self._memo if self._is_repeatable and not self._pending else None

    def _join_spec(
        self, tensor: torch.Tensor, spec: RecomputeSpec, record: Record | None = None
    ) -> RecomputedTensor:
        source = self._sources.get(tensor.untyped_storage()._cdata)
        if source is not None and source.path == SOURCE_PATH:
            self._outputs.setdefault(spec, source.ordinal)
        return super()._join_spec(tensor, spec, record)

    def _settled(self) -> tuple[int, ...]:
        """Note the specs that were decided since the last call, and return their outputs."""
        decided = [spec for spec in self._pending if not spec.is_undecided]
        self._pending = [spec for spec in self._pending if spec not in decided]
        for spec in decided:
            between: dict[int, RecomputeSpec] = {}
            self._note_inputs(spec, between)
            makers = [self._outputs.get(between[number]) for number in sorted(between)]
            known = tuple(one for one in makers if one is not None)
            self._is_repeatable &= spec.fallback is None and len(known) == len(makers)
            if (output := self._outputs.get(spec)) is not None:
                self._memo.makers[output] = known
        return tuple(self._outputs[spec] for spec in decided if spec in self._outputs)

    def _note_inputs(self, spec: RecomputeSpec, between: dict[int, RecomputeSpec]) -> None:
        for packed in spec.inputs:
            if isinstance(packed, HandledTensor) and packed.handle.site.path == SOURCE_PATH:
                self._memo.read.add(packed.handle.site.ordinal)
            elif isinstance(packed, RecomputedTensor) and packed.spec.number and packed.spec.site == spec.site:
                if packed.spec.number in between:
                    continue
                between[packed.spec.number] = packed.spec
                self._note_inputs(packed.spec, between)


class RepeatingPacker(LayerPacker):
    """Packs a run's tensors by the ``memo`` of an earlier run. Other arguments as for ``LayerPacker``."""

    def __init__(
        self, memo: RunMemo, saved_tensors: SavedTensors, where: Where, constants: Collection[int],
        sources: Mapping[int, Site],
    ) -> None:  # fmt: skip
        super().__init__(saved_tensors, where, constants, sources)
        self.is_other = False  # a tensor did not fit
        self._counters = saved_tensors.manager.counters
        assert self._recomputer is not None
        self._again = self._recomputer
        self._specs = self._again.specs
        self._memo = memo
        self._steps = iter(memo.steps)
        self._records: dict[int, ProducerRecord] = {}  # by the numbers of outputs
        self._pending: dict[int, Undecided] = {}

    def record(self, number: int, producer: str, function: Function, inputs: Sequence[Any], output: Any) -> None:
        """Record that ``function(*inputs)`` gives the output ``number``, as in the earlier run. All are plain."""
        if self.is_other or not inputs or is_cast_automatically(output.device.type):
            return
        storage = output.untyped_storage()
        num_bytes = storage.nbytes()
        if output.numel() * output.element_size() == num_bytes:
            self._records[number] = ProducerRecord(
                producer, function, tuple(map(alias_of, inputs)), weakref.ref(storage), num_bytes,
                output.shape, output.stride(), output.dtype, version_probe_of(output),
            )  # fmt: skip

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Pack ``tensor`` as the tensor of the same step was packed, or decide from here on."""
        if self.is_other:
            return super().pack(tensor)
        step = next(self._steps, None)
        found = None if self.is_constant(tensor) else self._where()
        if found is None:
            if step is None or step.site is not None:
                self._stop()
            return keep(tensor)
        group, site = found
        if step is not None and step.site is site and (not step.settled or all(map(self._settle, step.settled))):
            packed = self._pack_again(step, tensor, group)
            if packed is not None:
                return packed
        self._stop()
        return self.pack_at(tensor, group, site)

    def join(self, tensor: torch.Tensor, group: Group) -> Packed:
        """Return the packed form of an input of a recomputed storage."""
        spec = self._spec_of(tensor)
        return super().join(tensor, group) if spec is None else self._join_spec(tensor, spec)

    def end(self) -> None:
        """End the run: nothing more is saved."""
        if not self.is_other and (next(self._steps, None) is not None or not all(map(self._settle, [*self._pending]))):
            self._stop()

    def _pack_again(self, step: Step, tensor: torch.Tensor, group: Group) -> Packed | None:
        """Return the packed form of ``tensor``, or None if it does not fit."""
        if step.is_kept:  # a tensor may always be kept
            storage = tensor.untyped_storage()
            self._footprint.add(storage.nbytes())
            self._counters.num_not_recomputed += step.num_refused
            self._offload.account_kept(storage, group)
            self._again.saved(storage)
            return keep(tensor, group)
        spec = self._spec_of(tensor)
        if step.output is not None and spec is None:
            spec = self._begin_again(step, step.output, tensor, group)
        elif step.output is not None:
            return None
        if step.is_recomputed != (spec is not None):
            return None
        storage = tensor.untyped_storage()
        handle = self._offload.find(storage)
        if spec is None and handle is None and step.decision is None:
            return None  # it had the handle of another tensor's storage
        self._footprint.add(storage.nbytes())
        if spec is not None:
            return self._join_spec(tensor, spec)
        self._counters.num_not_recomputed += step.num_refused
        self._again.saved(storage)
        if handle is None and step.decision is not None:
            assert step.site is not None
            decision = self._decider.decide_again(step.decision, step.site, storage, group.position)
            handle = self._offload.new_handle(storage, step.site, group, decision)
        return self._join_handle(tensor, handle, group)

    def _spec_of(self, tensor: torch.Tensor) -> RecomputeSpec | None:
        """Return the spec of the storage of ``tensor``, or None if it has none, was changed since, or is no output."""
        storage = tensor.untyped_storage()
        spec = self._specs.get(storage._cdata)
        if spec is None or spec.output() is not storage or spec.version_probe.changed():
            return None
        # An output is described by its layout alone; a conjugate view is not.
        return None if tensor.is_conj() or tensor.is_neg() else spec

    def _begin_again(self, step: Step, output: int, tensor: torch.Tensor, group: Group) -> RecomputeSpec | None:
        record = self._records.pop(output, None)
        if record is None or not record.is_unchanged(tensor.untyped_storage()):
            return None
        assert step.site is not None
        undecided = self._pending[output] = self._again.begin_again(record, tensor, step.site, group, self)
        return undecided.spec if not step.is_settled or self._settle(output) else None

    def _settle(self, output: int) -> bool:
        """Recompute ``output`` as in the earlier run. Return whether that is possible."""
        undecided = self._pending.get(output)
        if undecided is None or undecided.record.input_changed():
            return False
        makers = []
        for number in self._memo.makers[output]:
            record = self._records.pop(number, None)
            if record is None or not record.is_unchanged(record.output()):
                return False
            makers.append(record)
        if not self._may_read(undecided, makers):
            return False
        self._again.decide_again(undecided, makers)
        del self._pending[output]
        return True

    def _may_read(self, undecided: Undecided, makers: Sequence[ProducerRecord]) -> bool:
        """Whether the unsaved inputs are smaller than the output: ``Recomputer`` asks the same of inputs."""
        made = {maker.address for maker in makers}
        kept_bytes = 0
        for tensor in (alias.tensor for record in (undecided.record, *makers) for alias in record.inputs):
            storage = tensor.untyped_storage()
            if storage._cdata in made or storage._cdata in self._sources:
                continue
            if not self._again.is_in_graph(tensor) and not self.is_constant(tensor):
                kept_bytes += storage.nbytes()
        return kept_bytes < undecided.spec.num_bytes

    def _stop(self) -> None:
        """Decide from here on. Hold the outputs that were to be recomputed and are not settled."""
        self.is_other = True
        self._again.hold(self._pending.values())
        self._pending.clear()
        self._records.clear()

"""Repeats what was decided about the tensors that a layer saved in an earlier run, instead of deciding once more.

Deciding takes the host longer than enqueueing the kernels of a small layer. A layer that runs the operators that it ran
before saves the same tensors in the same order. So one run notes what became of each (``NotingPacker``), and later runs
do the same again (``RepeatingPacker``) as long as each tensor has the site it had. What depends on the run is checked
as before: versions, and that a storage is the output of the operator that recomputes it. From the first tensor that
does not fit, the run decides as if nothing had been noted; what it has put into the graph stays valid.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from megatron.swap.common.site_paths import SOURCE_PATH
from megatron.swap.common.types import Site
from megatron.swap.engine.decision import Decision
from megatron.swap.engine.handle import Group
from megatron.swap.engine.layer_recording import Undecided
from megatron.swap.engine.recompute_spec import RecomputeSpec
from megatron.swap.engine.saved_tensors import HandledTensor, LayerPacker, Packed, RecomputedTensor, SavedTensors, Where
from megatron.swap.profiling.recorder import SavedStorage


@dataclass(slots=True)
class Step:
    """What became of one saved tensor.

    Attributes:
        site: of the tensor.
        is_recomputed: its storage is.
        output: source site of a storage that is recomputed from this tensor on; ``None``: it is known already, or not
            recomputed.
        decision: of a storage that gets a handle with this tensor; ``None``: it has one already, or is kept.
        num_refused: refusals to recompute it.
        is_settled: ``output`` is settled at once: what it is recomputed from has been saved.
        settled: outputs of earlier steps that are settled before this one: no more of their inputs are saved.
    """

    site: Site
    is_recomputed: bool
    output: Site | None
    is_settled: bool
    decision: Decision | None
    num_refused: int
    settled: tuple[Site, ...]


@dataclass
class RunMemo:
    """What became of the tensors of a run. Outputs of operators are named by their source sites.

    Attributes:
        steps: one for each saved tensor that is not constant.
        makers: for each recomputed output, the unsaved outputs that are recomputed before it, in their order.
        read: outputs that nothing but recomputation reads, and that are saved for it.
    """

    steps: list[Step] = field(default_factory=list)
    makers: dict[Site, tuple[Site, ...]] = field(default_factory=dict)
    read: set[Site] = field(default_factory=set)

    @functools.cached_property
    def outputs(self) -> frozenset[int]:
        """Numbers of the outputs whose operators have to be recorded."""
        made = {*self.makers, *self.read, *(one for makers in self.makers.values() for one in makers)}
        return frozenset(site.ordinal for site in made)


class NotingPacker(LayerPacker):
    """Packs a run's tensors, and notes what becomes of them. Arguments as for ``LayerPacker``."""

    def __init__(
        self, saved_tensors: SavedTensors, where: Where, constants: Collection[int], sources: Mapping[int, Site]
    ) -> None:
        super().__init__(saved_tensors, where, constants, sources)
        self._counters = saved_tensors.manager.counters
        self._memo = RunMemo()
        self._outputs: dict[RecomputeSpec, Site] = {}
        self._pending: list[RecomputeSpec] = []
        self._is_repeatable = True

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
        self._memo.steps.append(Step(site, is_recomputed, output, is_settled, decision, num_refused, settled))
        return packed

    def memo(self) -> RunMemo | None:
        """Return what was noted, at the end of the run; ``None``: it cannot be repeated."""
        self._settled()
        return self._memo if self._is_repeatable and not self._pending else None

    def _join_spec(
        self, tensor: torch.Tensor, spec: RecomputeSpec, record: SavedStorage | None = None
    ) -> RecomputedTensor:
        source = self._sources.get(tensor.untyped_storage()._cdata)
        if source is not None and source.path == SOURCE_PATH:
            self._outputs.setdefault(spec, source)
        return super()._join_spec(tensor, spec, record)

    def _settled(self) -> tuple[Site, ...]:
        """Note the specs that were decided since the last call, and return their outputs."""
        decided = [spec for spec in self._pending if spec.inputs or spec.fallback is not None]
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
                self._memo.read.add(packed.handle.site)
            elif isinstance(packed, RecomputedTensor) and packed.spec.number and packed.spec.site == spec.site:
                between[packed.spec.number] = packed.spec
                self._note_inputs(packed.spec, between)


class RepeatingPacker(LayerPacker):
    """Packs a run's tensors as ``memo`` says.

    Args:
        memo: of an earlier run.
        saved_tensors, where, constants, sources: as for ``LayerPacker``.

    Attributes:
        outputs: numbers of the outputs whose operators have to be recorded.
        is_other: a tensor did not fit.
    """

    def __init__(
        self,
        memo: RunMemo,
        saved_tensors: SavedTensors,
        where: Where,
        constants: Collection[int],
        sources: Mapping[int, Site],
    ) -> None:
        super().__init__(saved_tensors, where, constants, sources)
        self.outputs = memo.outputs
        self.is_other = False
        self._counters = saved_tensors.manager.counters
        self._memo = memo
        self._steps = iter(memo.steps)
        self._pending: dict[Site, Undecided] = {}

    def pack_at(self, tensor: torch.Tensor, group: Group, site: Site) -> Packed:
        """Pack ``tensor`` as the tensor of the same step was packed, or decide from here on."""
        if not self.is_other:
            step = next(self._steps, None)
            if step is not None and step.site is site and all(map(self._settle, step.settled)):
                packed = self._repeat(step, tensor, group)
                if packed is not None:
                    self._footprint.add(tensor.untyped_storage().nbytes())
                    self._counters.num_not_recomputed += step.num_refused
                    return packed
            self._stop()
        return super().pack_at(tensor, group, site)

    def end(self) -> None:
        """End the run: nothing more is saved."""
        if not self.is_other and (next(self._steps, None) is not None or not all(map(self._settle, [*self._pending]))):
            self._stop()

    def _repeat(self, step: Step, tensor: torch.Tensor, group: Group) -> Packed | None:
        """Return the packed form of ``tensor``; ``None``: it does not fit."""
        recomputer = self._recomputer
        assert recomputer is not None
        spec = recomputer.find(tensor)
        if step.output is not None:
            if spec is not None or self._sources.get(tensor.untyped_storage()._cdata) != step.output:
                return None
            undecided = recomputer.begin_again(tensor, step.site, group, self)
            if undecided is None:
                return None
            self._pending[step.output] = undecided
            if step.is_settled and not self._settle(step.output):
                return None
            return self._join_spec(tensor, undecided.spec)
        if step.is_recomputed or spec is not None:
            return self._join_spec(tensor, spec) if step.is_recomputed and spec is not None else None
        storage = tensor.untyped_storage()
        handle = self._offload.find(storage)
        if handle is None and step.decision is not None:
            decision = self._decider.decide_again(step.decision, step.site, storage, group.position)
            handle = self._offload.new_handle(storage, step.site, group, decision)
        elif handle is None:
            self._offload.account_kept(storage, group)
        recomputer.saved(storage)
        return self._join_handle(tensor, handle, group)

    def _settle(self, output: Site) -> bool:
        """Recompute ``output`` from what it was recomputed from. Return whether that is possible."""
        undecided, makers, recomputer = self._pending.get(output), self._memo.makers[output], self._recomputer
        assert recomputer is not None
        if undecided is None:
            return False
        addresses = self._addresses(makers) if makers else ()
        if addresses is None or not recomputer.decide_again(undecided, addresses):
            return False
        del self._pending[output]
        return True

    def _addresses(self, outputs: Collection[Site]) -> list[int] | None:
        known = {site: address for address, site in self._sources.items()}
        return [known[output] for output in outputs] if known.keys() >= set(outputs) else None

    def _stop(self) -> None:
        """Decide from here on. What was to be recomputed, and is not settled, is held."""
        self.is_other = True
        assert self._recomputer is not None
        self._recomputer.hold(self._pending.values())
        self._pending.clear()

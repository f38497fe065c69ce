"""The operators of a layer that is followed: learned by watching one run, then recorded, then repeated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from math import inf
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack

from megatron.swap.common.site_paths import CHECKPOINT_PATH
from megatron.swap.common.types import Site
from megatron.swap.devices.plain_tensors import is_plain
from megatron.swap.engine.handle import Alias
from megatron.swap.engine.producer_records import version_probe_of
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.recomputed_run import seeing_saved
from megatron.swap.engine.saved_tensors import LayerPacker, SavedTensors
from megatron.swap.layers.measure import form_of
from megatron.swap.layers.run import LayerRun
from megatron.swap.native.operator_following import load_operators
from megatron.swap.operators.kinds import tensors_in
from megatron.swap.operators.records import OperatorFollower, OperatorOrder, OperatorRecords, OperatorWatch
from megatron.swap.operators.repeats import RepeatedRuns

# A layer is followed no more after this many runs in a row of which C++ has not seen all operators. Such a layer takes
# a gradient, enters a dispatch mode, or has operators in other threads. Single runs do so while `torch.compile`
# compiles.
MOST_UNSEEN = 3

# A storage by its number in an order, and an alias that shows whether it was changed.
Probe = tuple[OperatorOrder, int, Alias]


class Makers:
    """Follows a layer's operators, to recompute saved tensors. ``call`` is its forward, ``constants`` its weights."""

    def __init__(
        self, saved_tensors: SavedTensors, call: Callable[..., Any], constants: Callable[[], list[torch.Tensor]], *,
        is_possible: bool = True,
    ) -> None:  # fmt: skip
        self._saved_tensors = saved_tensors
        self._call = call
        self._constants = constants
        # C++ is built once for a machine, and now: a step that waits for the compiler would be judged slow.
        self.is_following = load_operators() is not None and is_possible
        # The first step shows the order of the operators, and in-place changes. It recomputes nothing.
        self.is_first_step = True
        self._num_unseen = 0  # runs in a row
        self._orders: dict[int, OperatorOrder] = {}  # of the n-th run
        self._saved: dict[int, tuple[Hashable, ...]] = {}  # forms of the tensors that the n-th run saves
        self._probes: list[Probe] = []
        # Outputs to record, by run, under the present policy; None: all. Before a run has shown it there is no entry.
        self._wanted: dict[int, frozenset[int] | None] = {}
        self._repeats = RepeatedRuns()
        self._records: OperatorRecords | None = None  # of the present run

    def order(self, run: LayerRun) -> OperatorOrder | None:
        """Return the operators of ``run``, as far as they are known."""
        return self._orders.get(run.nth)

    def did(self, run: LayerRun) -> Any:
        """Return the operators of the last run like ``run`` with the shapes of outputs, or its saved tensors' forms."""
        # A layer that is not followed is told from others by its saved tensors.
        order = self._orders.get(run.nth)
        return self._saved.get(run.nth) if order is None else zip(order.operators, order.shapes, strict=True)

    def note_sources(self, run: LayerRun) -> None:
        """Note which inputs of the layer operators may be recomputed from."""
        run.sources = {}
        if self._saved_tensors.manager.decider.recomputes_layer(run.number):
            for number, tensor in enumerate(filter(is_plain, run.inputs())):
                run.sources[tensor.untyped_storage()._cdata] = Site(run.number, CHECKPOINT_PATH, number)

    # ---------------------------------------------------------------------- a run

    def begin(self, run: LayerRun) -> Callable[[Collection[int]], None] | None:
        """Begin ``run``. Return the callback for its end, which takes the storages that are recomputed."""
        order, recomputer = self._orders.get(run.nth), self._saved_tensors.recomputer
        if order is not None and recomputer is not None and order.num_modes != _len_torch_dispatch_stack():
            self._repeats.forget((run.number, run.nth))
            self._forget_order(run, recomputer)
        is_known = run.nth in self._orders and self._wanted.get(run.number) is not None and not self.is_first_step
        is_known &= self._saved_tensors.is_repeatable and not run.runs_once
        self._repeats.begin((run.number, run.nth), is_known)
        if self._repeats.is_repeating:
            return None
        number, nth = run.number, run.nth
        return lambda addresses: self._note_recomputed(number, nth, addresses)

    def packer(self, *arguments: Any) -> LayerPacker:
        """Return the packer of the run that has begun. Arguments as for ``SavedTensors.hooks``."""
        return self._repeats.packer(*arguments)

    def run(self, run: LayerRun) -> Any:
        """Run the layer. If some of its saved tensors may be recomputed, watch its operators, or record them."""
        recomputer = self._saved_tensors.recomputer
        if recomputer is None or not recomputer.is_recording or not self.is_following:
            return self.run_unwatched(run, *run.args, **run.kwargs)
        order = self._orders.get(run.nth)
        if order is None or self.is_first_step:
            return self.run_watched(run, *run.args, **run.kwargs)
        assert run.sources is not None  # noted as the layer was called
        follower: OperatorFollower
        if self._repeats.is_repeating:
            follower = self._repeats.recording(recomputer, run.sources, order)
        else:
            tensors, wanted = self._tensors_before(run), self._wanted.get(run.number)
            follower = self._records = OperatorRecords(recomputer, run.number, run.sources, order, tensors, wanted)
        with follower:
            result = self._call(*run.args, **run.kwargs)
        self._repeats.end(follower.is_as_watched)
        if not follower.is_as_watched:  # the next run is watched
            self._records = None
            self._forget_order(run, recomputer)
        return result

    def end(self) -> None:
        """Drop all references to the run, which is over or has failed."""
        self._records = None
        self._repeats.drop_packer()

    def run_unwatched(self, run: LayerRun, *args: Any, **kwargs: Any) -> Any:
        """Run the layer. While steps are measured, note the forms of its saved tensors."""
        with nullcontext() if run.kind is None else self._noting_saved(run):
            return self._call(*args, **kwargs)

    def run_watched(self, run: LayerRun, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and learn the order of its operators."""
        recomputer = self._saved_tensors.recomputer
        assert recomputer is not None
        before = self._orders.get(run.nth)
        watching = OperatorWatch(recomputer, self._tensors_before(run))
        with watching as watch, seeing_saved(watch.saves), self._noting_saved(run):
            result = self._call(*args, **kwargs)
        if not watch.saw_all:
            self._num_unseen += 1
            self.is_following = self._num_unseen < MOST_UNSEEN
            self._orders.pop(run.nth, None)
            return result
        self._num_unseen = 0
        order = self._orders[run.nth] = watch.end()
        order.needs = self.needs(run)
        if before is not None and before.operators == order.operators:
            order.last_write |= {number: at for number, at in before.last_write.items() if at == inf}
        for tensor in (*run.tensors(), *tensors_in(result)):  # the model may change them
            if (number := watch.number(tensor)) is not None:
                self._probes.append((order, number, version_probe_of(tensor)))
        return result

    def must_watch(self, run: LayerRun) -> bool:
        """Whether a run in a checkpoint has to be watched."""
        # Unwatched, the first run under a plan would have to watch, and to keep the outputs of single operators.
        return bool(run.like) and self.is_following and run.nth not in self._orders

    def needs(self, run: LayerRun) -> tuple[bool, ...]:
        """Return which of the tensors that exist before ``run`` need gradients."""
        return tuple([tensor.requires_grad for tensor in self._tensors_before(run)])

    def take_probes(self) -> list[Probe]:
        """Return the probes of the run that has ended, for ``check``."""
        probes, self._probes = self._probes, []
        return probes

    @staticmethod
    def check(probes: list[Probe]) -> None:
        """Note the storages that were changed in place between forward and backward."""
        for order, number, probe in probes:
            if probe.changed():
                order.last_write[number] = inf
        probes.clear()

    def forget_decisions(self) -> None:
        """Let the next run record all operators and repeat nothing: the policy changes."""
        self._wanted = {}
        self._repeats.clear()

    # ------------------------------------------------------------------------- parts

    def _tensors_before(self, run: LayerRun) -> list[torch.Tensor]:
        return [*self._constants(), *run.tensors()]

    def _forget_order(self, run: LayerRun, recomputer: Recomputer) -> None:
        del self._orders[run.nth]
        self._wanted.pop(run.number, None)
        recomputer.forget_trials(run.number)

    def _note_recomputed(self, number: int, nth: int, addresses: Collection[int]) -> None:
        """Note the operators that the layer's next runs under this policy have to record, and outcomes to repeat."""
        records, self._records = self._records, None
        if records is None:
            return
        made = records.made_at(addresses)
        if number not in self._wanted:
            self._wanted[number] = made or None
        elif made != self._wanted[number]:
            self._wanted[number] = None
        else:
            self._repeats.note(self._orders[nth])

    @contextmanager
    def _noting_saved(self, run: LayerRun) -> Iterator[None]:
        saved: list[Hashable] = []
        with seeing_saved(lambda tensor: saved.append((form_of(tensor), _held_bytes(tensor)))):
            yield
        self._saved[run.nth] = tuple(saved)


def _held_bytes(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage().nbytes() if is_plain(tensor) else None

"""Steps an optimizer whose state is offloaded: the state passes through the device in buckets.

For each bucket the optimizer's own step runs on shards of its parameters and of their state, as if they were
parameters. Elementwise update rules give the same bits; for other rules a bucket holds whole parameters.

While compute steps a bucket, later buckets are loaded and earlier ones are offloaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from megatron.swap.common.types import SwapError
from megatron.swap.devices.base import Mark
from megatron.swap.optimizer.param_state import MAIN, ParamShard, ParamState, batches, has_shape_of
from megatron.swap.optimizer.partial_step import PartialStep, Settings, Table
from megatron.swap.optimizer.state import OptimizerState
from megatron.swap.optimizer.state_memory import TensorRequest
from megatron.swap.optimizer.transfers import Bucket, Move, PendingBucket, StateTransfers, as_bytes
from megatron.swap.optimizer.wrapped import scales_of, stored

NUM_BUFFERS = 3  # buckets that may always be on the device: one is loaded, one is stepped, one is offloaded

# Called with a parameter, the first and last + 1 of some of its elements, and their new values on the device.
OnUpdated = Callable[[torch.Tensor, int, int, torch.Tensor], None]


@dataclass(frozen=True)
class StepOptions:
    """Options of a stepper."""

    is_elementwise: bool  # whether the optimizer may step slices of its parameters
    on_updated: OnUpdated = lambda *_: None  # also called for parameters that are not offloaded
    # Returns the device bytes that buckets may use now, and that copies to the host may still hold after the step.
    measure_room: Callable[[], int] = lambda: 0
    tables: Sequence[Table] = ()  # as for ``PartialStep``
    # Names and types of a parameter's state, if the optimizer keeps scales by parameter. Such an optimizer steps whole
    # parameters, and copies the state of all that it steps at once to single precision. So parameters whose state is
    # kept are stepped a bucket at a time too.
    scaled_types: Callable[[torch.Tensor], dict[str, torch.dtype]] | None = None


class BucketLoader:
    """Loads the buckets of one optimizer. A bucket is pending (with a disk: being read), then loaded, then taken."""

    def __init__(self, transfers: StateTransfers) -> None:
        self._transfers = transfers
        # Before a step begins, the order of the previous step is assumed.
        self._order: list[list[ParamShard]] = []
        self._remaining: deque[list[ParamShard]] | None = None  # None: no bucket of the next step was begun
        self._pending: deque[PendingBucket] = deque()
        self._loaded: deque[Bucket] = deque()

    @property
    def is_complete(self) -> bool:
        """Whether every bucket of the next step is loaded, or its copy is enqueued."""
        return self._remaining is not None and not self._remaining and not self._pending

    def set_order(self, order: list[list[ParamShard]]) -> None:
        """Set the buckets of the step that begins. Drop all loaded buckets if others were assumed."""
        if order != self._order:
            self.clear()
            self._order = order

    def clear(self) -> None:
        while self._loaded:
            self._transfers.discard(self._loaded.popleft())
        self._pending.clear()
        self._remaining = None

    def take(self) -> Bucket | None:
        return self._loaded.popleft() if self._loaded else None

    def load(self, room_bytes: int, *, is_ahead: bool = False) -> None:
        """Load the next buckets that fit into ``room_bytes`` of device memory: at least one, except ahead of a step."""
        while (pending := self._next_pending()) is not None:
            wanted_bytes = pending.num_bytes + self._transfers.loaded_bytes
            # One bucket's room stays free: for the bucket that is stepped and then offloaded.
            fits = wanted_bytes <= room_bytes - self._transfers.bucket_bytes
            # Ahead of a step layers run, so a load must not wait for the disk, nor take memory from others.
            is_next = fits and pending.is_read if is_ahead else fits or not self._loaded
            if not is_next:
                return
            self._transfers.release_offloaded(max(0, room_bytes - wanted_bytes))
            bucket = self._transfers.load(pending, is_ahead=is_ahead)
            if bucket is None:
                return
            self._loaded.append(bucket)
            self._pending.popleft()

    def _next_pending(self) -> PendingBucket | None:
        """Return the bucket to load next, or None, and begin to read later ones."""
        if self._remaining is None:
            self._remaining = deque(self._order)
        while self._remaining and len(self._pending) < self._transfers.num_ahead:
            self._pending.append(self._transfers.begin_load(self._remaining.popleft()))
        return self._pending[0] if self._pending else None


class OptimizerStepper:
    """Replaces an optimizer's step. Raises a ``UsageError`` for settings in tensors, or an error without room."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, transfers: StateTransfers,
        param_states: Mapping[torch.Tensor, ParamState], options: StepOptions,
    ) -> None:  # fmt: skip
        self._optimizer = optimizer
        self._transfers = transfers
        self._options = options
        self._partial_step = PartialStep(optimizer, options.tables)
        self._loader = BucketLoader(transfers)
        self._updates: list[tuple[Mark, Mark]] = []
        # The optimizer's offloaded and kept state.
        self.state = OptimizerState(optimizer, transfers, param_states, options.is_elementwise)
        types_of = self._partial_step.probe_state if options.is_elementwise else options.scaled_types
        if types_of is not None:  # allocate all, so that an error comes before training
            transfers.memory.allocate([
                TensorRequest(one, name, dtype)
                for one in self.state.param_states
                for name, dtype in types_of(one.param).items()
            ])  # fmt: skip

    # ------------------------------------------------------------------ stepping

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Do what ``optimizer.step`` does. After a failure some parameters are a step ahead."""
        if closure is not None:
            raise SwapError("an optimizer whose state is offloaded takes no closure: it would run once per bucket.")
        self.state.end_materialize()
        self._updates = []
        self._loader.set_order(list(self._bucket_shards()))
        groups = self._optimizer.param_groups
        try:
            advanced = self._step_all()
        finally:  # a step that failed leaves buckets behind
            self._loader.clear()
        self._transfers.release_offloaded(self._options.measure_room())
        for group, settings in zip(groups, advanced, strict=True):
            group.update(settings)

    def _step_all(self) -> list[Settings]:
        """Step all parameters, and return each group's settings after the step."""
        self._loader.load(self._room_bytes())  # first, so that the link works while kept parameters are stepped
        for kept in self._kept():
            advanced = self._partial_step(kept)
            for params in kept:
                for param in params:
                    self._options.on_updated(param, 0, param.numel(), param.detach())
        while (bucket := self._loader.take()) is not None:  # ``load`` loads at least one while any remains
            advanced = self._step_bucket(bucket)
            room_bytes = self._room_bytes()
            # The first step creates moments, so more may be offloaded than was loaded.
            self._transfers.release_offloaded(max(0, room_bytes - self._transfers.loaded_bytes))
            self._loader.load(room_bytes)
        return advanced

    def _kept(self) -> Iterator[list[list[torch.Tensor]]]:
        """Yield the parameters whose state is kept, by group: all at once, or a bucket's bytes at a time."""
        groups = [
            [param for param in group["params"] if param not in self.state.offloaded]
            for group in self._optimizer.param_groups
        ]
        if self._options.scaled_types is None:
            yield groups
            return
        for number, params in enumerate(groups):
            for part in [*batches(params, attrgetter("nbytes"), self._transfers.bucket_bytes)] or [[]]:
                yield [part if other == number else [] for other in range(len(groups))]

    def _room_bytes(self) -> int:
        return max(self._options.measure_room(), NUM_BUFFERS * self._transfers.bucket_bytes)

    def _bucket_shards(self) -> Iterator[list[ParamShard]]:
        """Return each bucket's shards, filled up to the bucket size."""
        shards = (
            shard for param_state in self.state.offloaded.values() if _gradient(param_state.param) is not None
            for shard in self.state.shards(param_state)
        )  # fmt: skip
        return batches(shards, attrgetter("num_bytes"), self._transfers.bucket_bytes)

    def _step_bucket(self, bucket: Bucket) -> list[Settings]:
        """Step ``bucket``, offload it, and return each group's settings after the step."""
        self._transfers.wait_for(bucket)
        params: list[list[torch.Tensor]] = [[] for _ in self._optimizer.param_groups]
        slices = {shard: self._slice(shard, tensors) for shard, tensors in bucket.tensors.items()}
        # A step changes scales in place, so a failed step needs copies to restore them from.
        scales = [(one, one.clone()) for shard in slices for one in self._scales(shard)]
        for shard, param in slices.items():
            params[self._partial_step.group_of(shard.param_state.param)].append(param)
        began = self._transfers.mark()
        try:
            advanced = self._partial_step(params)
        except BaseException:
            for shard, param in slices.items():
                self._partial_step.take_back(shard.param_state.param, param)
                shard.param_state.release_wrapped()
            for scale, before in scales:  # those of the values in host memory
                scale.copy_(before)
            self._transfers.discard(bucket)
            raise
        self._updates.append((began, self._transfers.mark()))
        moves = [move for shard, param in slices.items() for move in self._take_back(shard, param)]
        self._transfers.offload(moves, bucket)
        return advanced

    def _slice(self, shard: ParamShard, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a parameter for ``shard``, with gradient and state, from its tensors on the device."""
        whole = shard.param_state.param
        param = tensors[MAIN] if MAIN in tensors else shard.slice_of(whole)
        if not self._options.is_elementwise:
            param = param.view(whole.shape)
            vars(param).update(vars(whole))  # Muon reads how the parameter is split, and among which ranks
        _set_gradient(param, shard)
        if shard.has_state:
            moments = {
                name: shard.param_state.loaded(name, tensor.view(param.shape))
                for name, tensor in tensors.items() if name != MAIN
            }  # fmt: skip
            self._optimizer.state[param] = moments | shard.small_state
        self._partial_step.lend(whole, param)
        return param

    def _scales(self, shard: ParamShard) -> list[torch.Tensor]:
        """Return the scales of a shard's values."""
        if self._options.scaled_types is None or not shard.has_state:
            return []
        of_wrappers = [scale for wrapper in shard.param_state.wrappers.values() for scale in scales_of(wrapper)]
        return [*self._partial_step.entries_of(shard.param_state.param), *of_wrappers]

    def _take_back(self, shard: ParamShard, param: torch.Tensor) -> list[Move]:
        """Report the new values of a stepped slice, record its state, and return the copies to enqueue."""
        param_state = shard.param_state
        self._options.on_updated(param_state.param, shard.start, shard.stop, param)
        large = {MAIN: param} if MAIN in param_state.tensors else {}
        shard.has_state, shard.small_state = True, {}
        for name, value in self._partial_step.take_back(param_state.param, param).items():
            (large if has_shape_of(value, param) else shard.small_state)[name] = value
        moves = []
        for name, value in large.items():
            values = stored(value)
            offloaded = self._transfers.memory.tensor(param_state, name, values.dtype)
            moves.append(Move(shard.span_of(offloaded), as_bytes(values)))  # holds the memory that ``wrap`` lets go
            if values is not value:
                param_state.wrap(name, value)
        self.state.publish(param_state)
        return moves

    def values_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return the values of a main parameter on the device, in its shape, wherever they are."""
        param_state = self.state.offloaded.get(param)
        if param_state is None or MAIN not in param_state.tensors:
            return param.detach()
        if self.state.is_materialized:
            return param.detach().to(param_state.tensors[MAIN].device)
        return self._transfers.load_main(param_state).view(param.shape)

    # -------------------------------------------------------- between two steps

    def load_ahead(self, room_bytes: int) -> None:
        """Load the last step's first buckets that fit into ``room_bytes``, without waiting for the disk."""
        if not self.state.is_materialized:
            self._loader.load(room_bytes, is_ahead=True)

    @property
    def is_loaded(self) -> bool:
        """Whether every bucket of the next step is loaded, or its copy is enqueued."""
        return self._loader.is_complete

    def drop_loaded(self) -> None:
        self._loader.clear()

    def set_offloaded(self, params: Collection[torch.Tensor]) -> None:
        """Offload the state of these parameters from now on, and keep the others'. Call this between steps."""
        if self.state.needs_change(params):
            self.state.end_materialize()
            self._loader.clear()
            self._loader.set_order([])
            self.state.set_offloaded(params)

    def update_ms(self) -> float:
        """Return the ms of the optimizer's kernels for offloaded state in the last step, once the device is over it."""
        return sum(ended.elapsed_ms_since(began) for began, ended in self._updates)

    # --------------------------------------------------------------- checkpoints

    def materialize(self) -> None:
        """Make offloaded tensors readable and writable in host memory until the next step. Raises ``DiskError``."""
        self._loader.clear()
        self.state.materialize()

    def materialize_for_load(self) -> None:
        """Do as ``materialize``, also for state that the optimizer would create in its first step."""
        self.materialize()
        self.state.add_missing()

    def end_materialize(self) -> None:
        self.state.end_materialize()

    def store_loaded(self) -> None:
        """Take over values that a checkpoint has loaded into ``optimizer.state``; tensors stay materialized."""
        self.state.store_loaded()
        self.materialize()


def _gradient(param: torch.Tensor) -> torch.Tensor | None:
    # Megatron's precision-aware optimizer, whose gradients have another dtype, names them ``decoupled_grad``.
    decoupled: torch.Tensor | None = vars(param).get("decoupled_grad")
    return param.grad if decoupled is None else decoupled


def _set_gradient(param: torch.Tensor, shard: ParamShard) -> None:
    """Set the gradient of ``param`` to the shard's slice of the whole gradient, under the same attribute."""
    whole = shard.param_state.param
    gradient = _gradient(whole)
    assert gradient is not None
    values = shard.slice_of(gradient).view(param.shape)
    if vars(whole).get("decoupled_grad") is None:
        param.grad = values
    else:
        param.decoupled_grad = values  # type: ignore[attr-defined]

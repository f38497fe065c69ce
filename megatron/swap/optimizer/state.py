"""The state of one optimizer: offloads it, keeps it on the device, or materializes it for checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from megatron.swap.optimizer.param_state import MAIN, OffloadedTensor, ParamShard, ParamState, has_shape_of
from megatron.swap.optimizer.transfers import Move, StateTransfers, as_bytes
from megatron.swap.optimizer.wrapped import stored


class OptimizerState:
    """Owns the entries of ``optimizer.state`` for parameters whose state is, or may be, offloaded."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, transfers: StateTransfers,
        param_states: Mapping[torch.Tensor, ParamState], is_elementwise: bool,
    ) -> None:  # fmt: skip
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._optimizer = optimizer
        self._transfers = transfers
        self._is_elementwise = is_elementwise
        self.is_materialized = False  # whether offloaded tensors are readable in host memory now, for a checkpoint
        # The states that are offloaded now, by parameter.
        self.offloaded = {param: param_states[param] for param in params if param in param_states}
        # The states that were offloaded before and are on the device now, by parameter.
        self.kept: dict[torch.Tensor, ParamState] = {}
        # The states of this optimizer's parameters, in the order of its groups.
        self.param_states = list(self.offloaded.values())

    @property
    def offloaded_bytes(self) -> int:
        """Offloaded bytes. Moments count after the first step if the optimizer steps whole parameters."""
        return sum(param_state.num_bytes for param_state in self.offloaded.values())

    @property
    def kept_bytes(self) -> int:
        """Device bytes of state that was offloaded before and is kept now."""
        return sum(param_state.num_bytes for param_state in self.kept.values())

    def offloaded_tensors(self) -> Iterator[OffloadedTensor]:
        for param_state in self.offloaded.values():
            yield from param_state.tensors.values()

    def shards(self, param_state: ParamState) -> list[ParamShard]:
        """Return the shards of a parameter, cut at the first call."""
        if not param_state.shards:
            num_elements = longest = param_state.param.numel()
            if self._is_elementwise and param_state.tensors:
                aligned = param_state.alignment_elements
                longest = max(self._transfers.bucket_bytes // param_state.element_bytes // aligned, 1) * aligned
            bounds = [*range(0, num_elements, longest), num_elements]
            param_state.shards = [ParamShard(param_state, start, stop) for start, stop in pairwise(bounds)]
        return param_state.shards

    def publish(self, param_state: ParamState) -> None:
        """Set the parameter's entry in ``optimizer.state``, as the optimizer's own step does."""
        self._optimizer.state[param_state.param] = param_state.moments | param_state.shards[0].small_state

    def set_small_state(self, param_state: ParamState, small_state: dict[str, Any]) -> None:
        """Set the state that is never offloaded, and mark all shards as having state."""
        for shard in self.shards(param_state):
            shard.has_state = True
            shard.small_state = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in small_state.items()
            }
        self.publish(param_state)

    # ----------------------------------------------------- offloaded or kept

    def needs_change(self, offloaded: Collection[torch.Tensor]) -> bool:
        """Whether ``set_offloaded`` with these parameters would copy any state."""
        return any((one.param in offloaded) != (one.param in self.offloaded) for one in self.param_states)

    def set_offloaded(self, offloaded: Collection[torch.Tensor]) -> None:
        """Offload the state of these parameters, and keep that of the others. Call this between steps."""
        for param_state in self.param_states:  # offload first: this frees device memory for the state that is kept
            if param_state.param in offloaded and param_state.param in self.kept:
                self._offload(param_state)
        self._transfers.release_offloaded()
        for param_state in self.param_states:
            if param_state.param not in offloaded and param_state.param in self.offloaded:
                self._keep(param_state)

    def _keep(self, param_state: ParamState) -> None:
        self.shards(param_state)
        for name, values in self._transfers.load_whole(param_state).items():
            tensor = param_state.tensors[name]
            tensor.tensor.data = values.view(tensor.shape)
        # Its room in host memory or on disk stays allocated, for a later offload.
        self.kept[param_state.param] = self.offloaded.pop(param_state.param)

    def _offload(self, param_state: ParamState) -> None:
        large, small = self._large_and_small(param_state)
        values = large | ({MAIN: param_state.param} if MAIN in param_state.tensors else {})
        moves = []
        for name, value in values.items():
            held = stored(value)
            tensor, source = self._transfers.memory.tensor(param_state, name, held.dtype), as_bytes(held)
            spans = (shard.span_of(tensor) for shard in param_state.shards)
            moves += [Move(span, source[span.start : span.stop]) for span in spans]
        self._transfers.offload(moves)  # in one call: slices of a tensor are one storage
        for name, value in values.items():
            if stored(value) is value:
                param_state.tensors[name].release()
            else:  # the optimizer may have made another object meanwhile: in its first step, or as it loaded
                param_state.wrap(name, value)
        self.offloaded[param_state.param] = self.kept.pop(param_state.param)
        if large or small:
            self.set_small_state(param_state, small)

    def _large_and_small(self, param_state: ParamState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a parameter's entry in ``optimizer.state``: what is offloaded, and the rest."""
        large: dict[str, Any] = {}
        small: dict[str, Any] = {}
        for name, value in self._optimizer.state.get(param_state.param, {}).items():
            (large if has_shape_of(value, param_state.param) else small)[name] = value
        return large, small

    # ------------------------------------------------------------ checkpoints

    def materialize(self) -> None:
        """Make every offloaded tensor readable and writable in host memory, or raise ``DiskError``."""
        self._transfers.synchronize()
        for tensor in self.offloaded_tensors():
            tensor.materialize()
        self.is_materialized = True

    def end_materialize(self) -> None:
        """Replace every materialized tensor by its placeholder."""
        if self.is_materialized:
            for tensor in self.offloaded_tensors():
                tensor.release()
        self.is_materialized = False

    def add_missing(self) -> None:
        """Add entries to ``optimizer.state`` for parameters that were never stepped, so that values can be loaded."""
        for param_state in self.offloaded.values():
            if param_state.param not in self._optimizer.state and param_state.moments:
                self._optimizer.state[param_state.param] = param_state.moments

    def store_loaded(self) -> None:
        """Copy values that were loaded into ``optimizer.state`` to the offloaded tensors."""
        for param_state in self.offloaded.values():
            self.store(param_state)

    def store(self, param_state: ParamState) -> None:
        """Copy a parameter's entry in ``optimizer.state`` to its offloaded tensors."""
        large, small = self._large_and_small(param_state)
        for name, value in large.items():
            held = stored(value)
            tensor = self._transfers.memory.tensor(param_state, name, held.dtype)
            if held is not tensor.tensor:
                tensor.materialize()
                tensor.tensor.copy_(held)
                if held is not value:
                    param_state.wrap(name, value)
                    if self.is_materialized:
                        tensor.materialize()
        if large or small:
            self.set_small_state(param_state, small)

    def is_in_host(self, param: torch.Tensor, name: str) -> bool:
        """Whether a tensor of ``param`` is offloaded, and readable in host memory now."""
        return self.is_materialized and param in self.offloaded and name in self.offloaded[param].tensors

    @contextmanager
    def on_device(self, param: torch.Tensor, name: str, *, writes: bool = False) -> Iterator[None]:
        """Put a materialized tensor of ``param`` on the device for a while, if it is offloaded."""
        if not self.is_in_host(param, name):
            yield
            return
        offloaded = self.offloaded[param].tensors[name]
        in_host = offloaded.tensor.data
        offloaded.tensor.data = in_host.to(offloaded.device, copy=True)
        try:
            yield
        finally:
            if writes:
                # Keep the values that the tensor has in the end.
                in_host.copy_(offloaded.tensor)
            offloaded.tensor.data = in_host

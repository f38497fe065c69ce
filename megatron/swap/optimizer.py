"""Puts ``StateSwap`` into Megatron's optimizers, and takes it out again.

Gradients, their norm, clipping and loss scaling stay Megatron's: they look at gradients alone, which do not rest. Ours
are the inner optimizer's step, and the copy of new main parameters to those of the model, which happens while the main
ones are on the device. Before a checkpoint is saved or loaded what rests is shown as tensors in host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import is_te_min_version
from torch import nn

from megatron.swap.devices.base import Device
from megatron.swap.disk_file import BLOCK_BYTES, DiskFile
from megatron.swap.host_arena import HostArena
from megatron.swap.planner.flags import state_bytes_of
from megatron.swap.planner.profile import Resting
from megatron.swap.planner.states import BUCKET_BYTES, PART_OF_HOST, bucket_bytes_before_disk
from megatron.swap.resting import Home, Member
from megatron.swap.state_mover import StateMover
from megatron.swap.state_swap import StateSwap
from megatron.swap.step_overlap import StepOverlap
from megatron.swap.summary import RankReport
from megatron.swap.types import GIB, UsageError, format_bytes

ELEMENTWISE = frozenset({"Adam", "AdamW", "CPUAdam", "FusedAdam", "FusedSGD", "Lion", "SGD"})
"""Optimizers, by the name of their class, that look at each element alone: they may step slices of parameters."""
PARAMETERWISE = frozenset({"OrthogonalizedOptimizer", "SOAP"})
"""By the name of their class or of one that it is made from: each parameter alone, as a whole. Muon is one."""
MOST_HOMES = 3
"""Of a parameter whose state rests: the main value, and two moments."""
ROUNDING = 1e-9
"""The whole is the sum of its parts."""
SAVES = ("state_dict", "save_parameter_state", "get_parameter_state_dp_zero")
LOADS = ("load_parameter_state", "load_parameter_state_from_dp_zero", "reload_model_params")
"""Methods of a Megatron optimizer that read everything, or replace it; a chained one calls some of each directly."""


class Expected(NamedTuple):
    """What is known of the state before it is made: ranks that share that of the same parameters, and at least so many
    that of experts; most bytes of one parameter's."""

    num_sharers: int
    num_expert_sharers: int
    state_bytes: int

    def bytes_of(self, param: torch.Tensor) -> int:
        """On this rank, of a parameter of the model. Megatron marks those of experts, which fewer ranks share."""
        num_sharers = self.num_sharers if getattr(param, "allreduce", True) else self.num_expert_sharers
        return -(-param.numel() * self.state_bytes // num_sharers)


class OptimizerSwap:
    """The optimizer state of one rank.

    Args:
        share: of all bytes, those that rest in host memory; 0 to 1.
        device: whose optimizer it is.
        limit_bytes: most host memory that is taken.
        min_bytes: smaller parameters stay.
        disk: where rests what host memory has no room for.
        expected: no more rests than there is room for beside activations, of state like this; ``None``: an error where
            there is less room.
    """

    def __init__(
        self,
        share: float,
        device: Device,
        limit_bytes: int,
        min_bytes: int,
        disk: DiskFile | None = None,
        expected: Expected | None = None,
    ) -> None:
        self._share = self._most_share = share
        self._expected = expected
        self._expected_sizes: list[int] = []
        self._device = device
        self._disk = disk
        if expected is not None:
            limit_bytes = int(PART_OF_HOST * limit_bytes)
        self._arena = HostArena(limit_bytes=limit_bytes, pinned=device.torch_device.type == "cuda")
        self._bucket_bytes = BUCKET_BYTES if disk is None else bucket_bytes_before_disk(limit_bytes)
        self._mover = StateMover(device, self._arena, disk, self._bucket_bytes)
        self._min_bytes = min_bytes
        self._swaps: list[StateSwap] = []
        self._overlap = StepOverlap(device, self._mover, self._swaps, self._bucket_bytes)
        self._num_begun: dict[nn.Module, int] = {}
        self._seen_bytes = self._resting_bytes = 0
        self._born: dict[torch.Tensor, Member] = {}
        self._seen: set[torch.Tensor] = set()
        self._passed_over: list[torch.Tensor] = []
        self._undo: list[Callable[[], None]] = []
        self._undo_saves: list[Callable[[], None]] = []

    def born(self, main_param: torch.Tensor) -> None:
        """Megatron has just made ``main_param``: it rests at once, or all of them would not fit the device."""
        self._seen.add(main_param)
        if self._rests(main_param):
            self._born[main_param] = self._mover.born(main_param)
        else:
            self._passed_over.append(main_param)

    def _rests(self, param: torch.Tensor) -> bool:
        """As evenly spread over the parameters as the share goes, whatever is still to come."""
        self._seen_bytes += param.nbytes
        return self._takes(param)

    def _takes(self, param: torch.Tensor) -> bool:
        """Whether it fits into the share of what was seen; then it rests."""
        resting_bytes = self._resting_bytes + param.nbytes
        if param.nbytes < max(1, self._min_bytes) or resting_bytes > self._most_share * self._seen_bytes:
            return False
        self._resting_bytes = resting_bytes
        return True

    def watch(self, chunk: nn.Module) -> None:
        """Copies run beside the layers of this model chunk, where memory is free."""
        if self._expected is not None:
            self._expected_sizes += [self._expected.bytes_of(one) for one in chunk.parameters() if one.requires_grad]
            self._most_share = min(self._share, self._room_bytes() / max(1, sum(self._expected_sizes)))
        for block in (module for module in chunk.modules() if isinstance(module, TransformerBlock)):
            for layer in block.layers:
                self._undo.append(layer.register_forward_pre_hook(self._layer_begins, with_kwargs=True).remove)

    def _room_bytes(self) -> int:
        """What surely finds room of what is expected."""
        num_homes = MOST_HOMES * len(self._expected_sizes)
        room_bytes = self._arena.sure_bytes(num_homes)
        if self._disk is not None:
            # A home that has no room in host memory goes there whole, and each takes whole blocks.
            lost_bytes = max(self._expected_sizes, default=0) // 2 + num_homes * BLOCK_BYTES
            room_bytes += max(0, self._disk.limit_bytes - lost_bytes)
        return room_bytes

    def _layer_begins(self, layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not layer.training:
            self._overlap.drain()
        elif torch._C._current_graph_task_id() == -1:  # else it runs again, in backward
            num_begun = self._num_begun[layer] = self._num_begun.get(layer, 0) + 1
            self._overlap.layer_begins(num_begun == 1)
            hidden_states = options.get("hidden_states", arguments[0] if arguments else None)
            is_last = num_begun == get_num_microbatches()
            if is_last and isinstance(hidden_states, torch.Tensor) and hidden_states.requires_grad:
                # Its gradient is the last that a layer's backward makes.
                hidden_states.register_hook(lambda _: self._overlap.layer_is_done())

    def step_ended(self, overlaps: bool, as_before: bool) -> None:
        """A training step is over, whether the optimizer was stepped or not.

        Args:
            overlaps: copies may run beside the layers of the next one.
            as_before: those will hold as much as in this one.
        """
        self._num_begun.clear()
        self._overlap.step_ended()
        if not as_before:
            self._overlap.forget()
        self._overlap.on = overlaps

    # ------------------------------------------------------- how much of it rests

    def resting(self) -> Resting:
        """All state, as far as that is known, the part of it that rests at most, the kernels of the last step, and the
        disk since the last call: each byte comes and goes in a step."""
        self._device.synchronize()
        if not self._resting_bytes:
            return Resting(0.0, 0.0, 0.0)
        update_ms = sum(swap.update_ms() for swap in self._swaps)
        members = self._members()
        sizes = {member: sum(home.num_bytes for home in member.homes.values()) for member in members}
        disk_gib = sum(sizes[member] for member in members if member.disk_bytes) / GIB
        moved_gib = 2 * sum(member.disk_bytes for member in members) / GIB
        disk_ms = 0.0 if self._disk is None else moved_gib * self._disk.traffic.take_ms_per_gib()
        most = self._resting_bytes / self._seen_bytes
        return Resting(sum(sizes.values()) / most / GIB, most, update_ms / most, disk_gib, disk_ms)

    def let_rest(self, part: float) -> None:
        """From now on ``part`` of all state rests, or as much as did at first. Between steps. What is on disk is the
        first that stays; of what is left, as evenly as at first."""
        members = self._members()
        on_disk, in_host = ([one for one in members if bool(one.disk_bytes) is where] for where in (True, False))
        # Of all bytes, those whose state never rests too.
        to_stay_bytes = max(0.0, self._resting_bytes - part * self._seen_bytes * (1 + ROUNDING))
        wanted: set[torch.Tensor] = set()
        for some in (on_disk, in_host):
            num_bytes = sum(member.param.nbytes for member in some)
            resting = _spread([member.param for member in some], max(0.0, num_bytes - to_stay_bytes))
            resting_bytes = sum(param.nbytes for param in resting)
            wanted |= resting
            to_stay_bytes = max(0.0, to_stay_bytes - (num_bytes - resting_bytes))
        for swap in self._swaps:
            swap.let_rest(wanted)

    def _members(self) -> list[Member]:
        return [member for swap in self._swaps for member in swap.members]

    @property
    def staying_bytes(self) -> int:
        """Device memory of what could rest and does not."""
        return sum(swap.staying_bytes for swap in self._swaps)

    # ---------------------------------------------------- Megatron's optimizers

    def attach(self, optimizer: Any) -> None:
        """The optimizer is built. From now on its state rests.

        Args:
            optimizer: a ``MegatronOptimizer``.
        """
        # A large parameter at the end leaves much of the share open, and large ones do not fit where small ones do.
        self._born.update((param, self._mover.born(param)) for param in self._passed_over if self._takes(param))
        for one in unchained(optimizer):
            self._attach(one, one.optimizer)

    def _attach(self, optimizer: Any, inner: torch.optim.Optimizer) -> None:
        def on_updated(param: torch.Tensor, start: int, stop: int, values: torch.Tensor) -> None:
            target = model_values(param)
            if target is not None:
                target[start:stop].copy_(values.view(-1))

        is_elementwise = type(inner).__name__ in ELEMENTWISE
        if not is_elementwise and not PARAMETERWISE & {kind.__name__ for kind in type(inner).__mro__}:
            known = ", ".join([*sorted(ELEMENTWISE), *(f"{name} and its kinds" for name in sorted(PARAMETERWISE))])
            raise UsageError(
                f"--swap-optimizer: nobody has made sure whether {type(inner).__name__} steps each parameter alone, as "
                f"those do: {known}. Leave --swap-optimizer out, or choose another --optimizer."
            )
        if self._disk is not None and not is_elementwise:
            raise UsageError(
                f"--swap-disk-dir: {type(inner).__name__} steps whole parameters, which do not pass through buffers "
                f"between disk and device. Leave --swap-disk-dir out, or take one of {', '.join(sorted(ELEMENTWISE))}."
            )
        model_values = _model_values(optimizer)
        others = [param for group in inner.param_groups for param in group["params"] if param not in self._seen]
        resting = {param for param in others if self._rests(param)}
        resting |= {param for param in others if param not in resting and self._takes(param)}
        swap = StateSwap(
            inner, self._mover, self._born, lambda param: param in resting, self._bucket_bytes, is_elementwise,
            on_updated, self._overlap.room_in_step,
        )  # fmt: skip
        if not swap.num_resting:
            return
        self._swaps.append(swap)
        self._replace(inner, "step", lambda _: swap.step)
        self._replace(optimizer, "prepare_grads", lambda prepare: _after(swap.hide, prepare))
        # Done bucket by bucket; what comes next would copy what rests again.
        self._replace(optimizer, "_copy_main_params_to_model_params", lambda _: lambda: None)
        self._replace(optimizer, "_copy_model_params_to_main_params", lambda copy: _one_by_one(optimizer, copy))
        for name in SAVES:
            self._replace(optimizer, name, lambda save: _after(swap.show, save), self._undo_saves)
        for name in LOADS:
            self._replace(optimizer, name, lambda load: _around(swap.show, load, swap.loaded))

        def make_state() -> None:
            """Megatron makes room for what it loads on the device, unless there is some."""
            swap.make_state()
            if optimizer.init_state_fn is not None:
                optimizer.init_state_fn(inner, optimizer.config)

        self._replace(optimizer, "load_state_dict", lambda load: _around(make_state, load, swap.loaded))

        def sharded(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def run(model: Any, is_loading: bool = False, *arguments: Any, **options: Any) -> Any:
                (make_state if is_loading else swap.show)()
                return original(model, is_loading, *arguments, **options)

            return run

        self._replace(optimizer, "sharded_state_dict", sharded, self._undo_saves)

    def _replace(
        self, owner: Any, name: str, build: Callable[[Any], Any], undo: list[Callable[[], None]] | None = None
    ) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return
        setattr(owner, name, build(original))
        (self._undo if undo is None else undo).append(functools.partial(delattr, owner, name))

    def homes(self) -> list[Home]:
        """Of all that rests now."""
        return [home for swap in self._swaps for home in swap.homes()]

    @property
    def booked_bytes(self) -> int:
        """Host memory that was taken."""
        return self._arena.booked_bytes

    def told(self) -> str:
        """What rests, in a line."""
        num_resting = sum(swap.num_resting for swap in self._swaps)
        if not num_resting:
            return (
                f"--swap-optimizer {self._share:g}: nothing rests, since no parameter is as large as --swap-min-mib, "
                "or the part is smaller than any"
            )
        disk_bytes = self._mover.disk_bytes
        host_bytes = sum(swap.resting_bytes for swap in self._swaps) - disk_bytes
        places = {"in host memory": host_bytes, "on disk": disk_bytes}
        told = ", ".join(f"{place}: {format_bytes(num_bytes)}" for place, num_bytes in places.items() if num_bytes > 0)
        return f"optimizer state of {num_resting} parameters rests {told}"

    def report_to(self, report: RankReport) -> None:
        """What a summary tells."""
        report.optimizer_host_bytes = self.booked_bytes
        report.optimizer_disk_bytes = self._mover.disk_bytes
        report.optimizer_out_bytes, report.optimizer_in_bytes = self._mover.out_bytes, self._mover.in_bytes

    def remove(self) -> None:
        """Training broke off: give Megatron's optimizers their own methods back, but for those that save. What rests
        is shown when they are called: nobody waits for it here."""
        while self._undo:
            self._undo.pop()()

    def close(self) -> None:
        """Training is over. What rests stays where it is, in tensors that a last checkpoint can be made of."""
        try:
            for swap in self._swaps:
                swap.show()  # a disk that fails now ends the run: the last checkpoint would be made of what is hidden
        finally:
            self.remove()
            while self._undo_saves:
                self._undo_saves.pop()()
            self._device.synchronize()
            self._arena.close()


def unchained(optimizer: Any) -> Iterator[Any]:
    """Of a ``MegatronOptimizer``, those that have an optimizer of torch's inside, and parameters to step."""
    if isinstance(optimizer, ChainedOptimizer):
        for one in optimizer.chained_optimizers:
            yield from unchained(one)
    elif optimizer.optimizer is not None and not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def expected_state(args: Any) -> Expected:
    """Of a run with Megatron's arguments."""
    num_ranks = num_expert_ranks = 1
    if args.use_distributed_optimizer:
        # Replicas, and the ranks of a sequence, share one optimizer; of several instances each has a copy of all state.
        of_shards = args.data_parallel_size * args.context_parallel_size // args.num_distributed_optimizer_instances
        of_experts = args.expert_model_parallel_size * args.expert_tensor_parallel_size
        num_ranks, num_expert_ranks = of_shards, max(1, of_shards * args.tensor_model_parallel_size // of_experts)
    state_bytes = state_bytes_of(args)
    if args.use_precision_aware_optimizer and not is_te_min_version("2.1.0"):
        state_bytes = 12  # main values are kept whole
    return Expected(num_ranks, num_expert_ranks, state_bytes)


def _spread(params: Sequence[torch.Tensor], most_bytes: float) -> set[torch.Tensor]:
    """Some of ``params``, as evenly among them as their sizes allow, then whatever else fits."""
    share = (1 + ROUNDING) * most_bytes / max(1, sum(param.nbytes for param in params))
    chosen: set[torch.Tensor] = set()
    chosen_bytes = seen_bytes = 0
    for is_even in (True, False):
        for param in params:
            seen_bytes += param.nbytes if is_even else 0
            if param not in chosen and chosen_bytes + param.nbytes <= share * seen_bytes:
                chosen_bytes += param.nbytes
                chosen.add(param)
    return chosen


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(then)
    def run(*arguments: Any, **options: Any) -> Any:
        first()
        return then(*arguments, **options)

    return run


def _around(first: Callable[[], None], then: Callable[..., Any], last: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(then)
    def run(*arguments: Any, **options: Any) -> Any:
        first()
        try:
            return then(*arguments, **options)
        finally:
            last()

    return run


def _one_by_one(optimizer: Any, copy: Callable[..., Any]) -> Callable[..., Any]:
    """In fp16 Megatron copies all parameters by a kernel that takes no host memory; one by one come the same bits."""

    @functools.wraps(copy)
    def run(*arguments: Any, **options: Any) -> Any:
        buffer, optimizer._dummy_overflow_buf = optimizer._dummy_overflow_buf, None
        try:
            return copy(*arguments, **options)
        finally:
            optimizer._dummy_overflow_buf = buffer

    return run


def _model_values(optimizer: Any) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """Where new values of a main parameter go: to as many of the model's, flat. ``None``: it is the model's own."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for mains, models in zip(optimizer.fp32_from_float16_groups, optimizer.float16_groups, strict=True):
            pairs += zip(mains, models, strict=True)
        of_model = dict(pairs)

        def values(main: torch.Tensor) -> torch.Tensor | None:
            model = of_model.get(main)
            return None if model is None else model.detach().view(-1)

        return values
    if isinstance(optimizer, DistributedOptimizer):
        groups = (
            (optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups),
            (optimizer.shard_fp32_groups, optimizer.model_fp32_groups),
        )
        for main_groups, model_groups in groups:
            for mains, models in zip(main_groups, model_groups, strict=True):
                pairs += ((main, model) for main, model in zip(mains, models, strict=True) if main is not None)
        of_shard = dict(pairs)

        def shard_values(main: torch.Tensor) -> torch.Tensor | None:
            model = of_shard.get(main)
            if model is None:
                return None
            place = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            buffer, _, bucket = optimizer.model_param_gbuf_map[model]
            values: torch.Tensor = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
            return values[place.start : place.end]

        return shard_values
    if isinstance(optimizer, FP32Optimizer):
        return lambda _: None
    raise UsageError(
        f"--swap-optimizer knows Megatron's fp32, fp16, bf16 and distributed optimizers; this run has a "
        f"{type(optimizer).__name__}. Leave --swap-optimizer out."
    )

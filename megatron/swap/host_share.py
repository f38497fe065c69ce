"""The Megatron edge for host memory: how much one rank may take, and how activations and optimizer state share it."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron.swap.config import SwapConfig
from megatron.swap.disk_file import disk_limit_bytes
from megatron.swap.guard import PART_OF_HOST
from megatron.swap.host_memory import (
    PAGE_BYTES,
    HostMemoryError,
    check_host_request,
    local_world_size,
    safe_host_bytes,
)
from megatron.swap.layer import least_saved_bytes
from megatron.swap.planner.states import PART_OF_HOST as STATE_PART_OF_HOST
from megatron.swap.planner.states import bucket_bytes_before_disk, part_before_disk
from megatron.swap.tiers.disk import host_bytes
from megatron.swap.tiers.spill import buffer_bytes
from megatron.swap.types import GIB, MIB, format_bytes


@dataclass(frozen=True)
class HostShare:
    """Of one rank.

    Attributes:
        limit_bytes: most that it takes.
        least_bytes: activations take at least so much, as far as that is known before the first step.
        buffers_bytes: of buffers between activations and a disk.
        disk_bytes: room on the disk behind it.
        guard_bytes: beside all that, for what the out-of-memory guard takes.
    """

    limit_bytes: int
    least_bytes: int
    disk_bytes: int
    buffers_bytes: int
    guard_bytes: int = 0

    @property
    def optimizer_bytes(self) -> int:
        """Most that optimizer state takes, which comes first; with a disk there is room for what has none here."""
        room_bytes = max(0, self.limit_bytes - self.buffers_bytes)
        left_bytes = max(0, room_bytes - -(-self.least_bytes // MIB) * MIB)
        if not self.disk_bytes:
            return left_bytes
        is_known = self.least_bytes > 0 or not self.buffers_bytes  # activations swap, nobody knows how many
        return max(left_bytes if is_known else 0, int(part_before_disk(room_bytes, self.disk_bytes)))


def host_share(config: SwapConfig, args: Namespace, swaps: bool) -> HostShare:
    """What this rank may take. ``swaps``: activations.

    Raises:
        UsageError: that disk has not as much room as is asked for.
        HostMemoryError: activations have no room in it, and no disk behind it; or the buffers before a disk have none.
    """
    has_disk, disk_bytes = config.disk_dir is not None, 0
    if config.disk_dir is not None:
        limit_bytes = None if config.disk_gib is None else int(config.disk_gib * GIB)
        disk_bytes = disk_limit_bytes(config.disk_dir, limit_bytes, local_world_size())
    if not swaps and not config.optimizer and not config.oom_guard:
        return HostShare(MIB, 0, disk_bytes, 0)  # nothing is swapped; a pool just may not be empty
    budget = safe_host_bytes(local_world_size())
    limit_bytes, limited_by = budget.safe_bytes, budget.reason
    if config.host_gib is not None:
        limit_bytes, limited_by = int(config.host_gib * GIB), f"--swap-host-gib {config.host_gib:g}"
        check_host_request(limit_bytes, budget, config.host_unchecked)
    guard_bytes = 0
    if config.oom_guard:
        guard_bytes = int(PART_OF_HOST * limit_bytes)
        limit_bytes -= guard_bytes
        limited_by += f", less {format_bytes(guard_bytes)} for --swap-oom-guard"
    needed_bytes = _least_bytes(config, args)
    if needed_bytes > limit_bytes and not has_disk:
        flag, way_out = f"--swap-layers {args.swap_layers}", "Swap fewer layers or modules"
        if config.plan is not None:
            flag, way_out = f"--swap-plan {args.swap_plan}", "Make a plan that swaps less"
        raise HostMemoryError(
            f"{flag} takes at least {format_bytes(needed_bytes)} of host memory on "
            f"each rank, but {format_bytes(limit_bytes)} may be booked ({limited_by}). {way_out}, "
            "use a smaller micro-batch, or raise --swap-host-gib (with --swap-host-unchecked if this "
            "machine's memory grows on demand), or name a --swap-disk-dir."
        )
    buffers_bytes = host_bytes(buffer_bytes(limit_bytes)) if swaps and has_disk else 0
    share = HostShare(limit_bytes, needed_bytes, disk_bytes, buffers_bytes, guard_bytes)
    of_state_bytes = host_bytes(bucket_bytes_before_disk(share.optimizer_bytes)) if config.optimizer and has_disk else 0
    of_state_room_bytes = share.optimizer_bytes * (STATE_PART_OF_HOST if config.optimizer_auto else 1)
    if buffers_bytes >= limit_bytes or of_state_bytes > of_state_room_bytes or limit_bytes < PAGE_BYTES:
        raise HostMemoryError(
            f"{format_bytes(limit_bytes)} of host memory may be booked ({limited_by}). Between the GPU and "
            f"--swap-disk-dir stand buffers of {format_bytes(buffers_bytes + of_state_bytes)}: raise --swap-host-gib."
        )
    return share


def _least_bytes(config: SwapConfig, args: Namespace) -> int:
    if config.plan is None:
        return least_saved_bytes(args, len(config.layers))
    if args.pipeline_model_parallel_size > 1 or config.prefetch_gib is not None:
        return 0  # which layers are here, or how many of the last ones stay, is not known yet
    return config.plan.least_host_bytes()

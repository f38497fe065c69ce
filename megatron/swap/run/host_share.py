"""Host memory of one rank: its limit, and its division between optimizer state and activations."""

from dataclasses import dataclass

from megatron.swap.common.disk_buffers import MAX_SPILL_BUFFER_BYTES, disk_buffer_bytes, staging_bytes
from megatron.swap.common.rounding import round_down, round_up
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB, MIB, format_bytes
from megatron.swap.engine.oom_guard import GUARD_HOST_FRACTION
from megatron.swap.forecast.states import STATE_HOST_FRACTION, bucket_bytes_before_disk, max_state_before_disk
from megatron.swap.memory.disk_file import disk_limit_bytes
from megatron.swap.memory.host_budget import HostMemoryBudget, Reservation
from megatron.swap.memory.host_memory import (
    PAGE_BYTES,
    HostCapacity,
    HostMemoryError,
    check_host_request,
    local_world_size,
    safe_host_bytes,
)


@dataclass(frozen=True)
class HostShare:
    """The host memory and disk of one rank, divided before anything is built."""

    limit_bytes: int  # for activations, optimizer state and disk buffers together; whole pages
    least_bytes: int  # lower bound of the activations' bytes, known before the first step; 0 if unknown
    disk_bytes: int  # room on disk; 0 without a disk
    buffers_bytes: int  # part of `limit_bytes`: the disk's, for activations on their way there and back
    guard_bytes: int = 0  # for the out-of-memory guard alone, in addition to `limit_bytes`

    @property
    def total_bytes(self) -> int:
        return self.limit_bytes + self.guard_bytes

    @property
    def disk_buffer_bytes(self) -> int:
        return disk_buffer_bytes(self.limit_bytes, MAX_SPILL_BUFFER_BYTES)

    @property
    def optimizer_bytes(self) -> int:
        """Most bytes of optimizer state, which is allocated before activations; the rest of it goes to disk."""
        room_bytes = max(0, self.limit_bytes - self.buffers_bytes)
        left_bytes = max(0, room_bytes - round_up(self.least_bytes, MIB))
        if not self.disk_bytes:
            return left_bytes
        is_known = self.least_bytes > 0 or not self.buffers_bytes  # else activations swap an unknown number of bytes
        return max(left_bytes if is_known else 0, int(max_state_before_disk(room_bytes, self.disk_bytes)))

    def reserve_state(self, settings: Settings) -> Reservation:
        """Create the rank's budget, and reserve the most that optimizer state may use (0 if none is offloaded).

        Resize the reservation once the state is allocated: a pool on ``Reservation.budget`` gets the remaining bytes.
        """
        num_bytes = self.optimizer_bytes if settings.offload_fraction else 0
        return HostMemoryBudget(self.total_bytes).reserve("optimizer state", num_bytes)


def host_share(
    settings: Settings, swaps: bool, needed_bytes: int = 0, capacity: HostCapacity | None = None
) -> HostShare:
    """Return the host memory and the disk that this rank may use, divided among their users.

    ``needed_bytes`` is a lower bound of the activations' bytes on this rank, or 0. ``capacity`` is the host's memory
    less the model's part; it is measured if it is not given. Raises a ``UsageError`` if the disk has less room than
    requested, and a ``HostMemoryError`` if activations do not fit and there is no disk, or the disk buffers do not.
    """
    has_disk, disk_bytes = settings.disk_dir is not None, 0
    if settings.disk_dir is not None:
        limit_bytes = None if settings.disk_gib is None else int(settings.disk_gib * GIB)
        disk_bytes = disk_limit_bytes(settings.disk_dir, limit_bytes, local_world_size())
    if not swaps and not settings.offload_fraction and not settings.oom_guard:
        return HostShare(MIB, 0, disk_bytes, 0)  # nothing is swapped, but a pool may not be empty
    capacity = capacity or safe_host_bytes(local_world_size())
    limit_bytes, limited_by = capacity.safe_bytes, capacity.reason
    if settings.host_gib is not None:
        limit_bytes, limited_by = int(settings.host_gib * GIB), f"--swap-host-gib {settings.host_gib:g}"
        check_host_request(limit_bytes, capacity, settings.host_unchecked)
    guard_bytes = 0
    if settings.oom_guard:
        guard_bytes = int(GUARD_HOST_FRACTION * limit_bytes)
        limited_by += f", less {format_bytes(guard_bytes)} for --swap-oom-guard"
    if not limit_bytes:
        raise HostMemoryError(
            f"the host has no memory left for activations: {limited_by}. End other programs, or give --swap-host-gib "
            "to use what the default leaves free."
        )
    limit_bytes = round_down(limit_bytes - guard_bytes, PAGE_BYTES)
    if needed_bytes > limit_bytes and not has_disk:
        flag, remedy = f"--swap-layers {settings.layers}", "Swap fewer layers or modules"
        if settings.plan is not None:
            flag, remedy = f"--swap-plan {settings.plan.file}", "Make a plan that swaps less"
        raise HostMemoryError(
            f"{flag} takes at least {format_bytes(needed_bytes)} of host memory on "
            f"each rank, but {format_bytes(limit_bytes)} may be reserved ({limited_by}). {remedy}, "
            "use a smaller micro-batch, or raise --swap-host-gib (with --swap-host-unchecked if this "
            "machine's memory grows on demand), or name a --swap-disk-dir."
        )
    buffers_bytes = staging_bytes(disk_buffer_bytes(limit_bytes, MAX_SPILL_BUFFER_BYTES)) if swaps and has_disk else 0
    share = HostShare(limit_bytes, needed_bytes, disk_bytes, buffers_bytes, guard_bytes)
    state_buffers_bytes = 0
    if settings.offload_fraction and has_disk:
        state_buffers_bytes = staging_bytes(bucket_bytes_before_disk(share.optimizer_bytes))
    state_room_bytes = share.optimizer_bytes * (STATE_HOST_FRACTION if settings.plans_optimizer else 1)
    if limit_bytes < PAGE_BYTES:
        raise HostMemoryError(f"less than a page of host memory may be reserved ({limited_by}): raise --swap-host-gib.")
    if buffers_bytes >= limit_bytes or state_buffers_bytes > state_room_bytes:
        raise HostMemoryError(
            f"{format_bytes(limit_bytes)} of host memory may be reserved ({limited_by}), and the buffers between the "
            f"GPU and --swap-disk-dir take {format_bytes(buffers_bytes + state_buffers_bytes)}: raise --swap-host-gib."
        )
    return share

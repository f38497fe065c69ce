"""What weights, gradients and the optimizer's state take, and where: held all the time, whatever activations do."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.swap.common.disk_buffers import MAX_SPILL_BUFFER_BYTES, NUM_STAGED, disk_buffer_bytes
from megatron.swap.common.types import GIB

BUCKET_BYTES = 256 << 20
"""Of state that rests, on the device. Copies of this size run at the link's full speed."""
BUCKETS_GIB = 3 * BUCKET_BYTES / GIB
"""While the optimizer steps (``optimizer/stepper.py``), once activations are gone."""
GAPS_GIB = 5 * BUCKET_BYTES / GIB
"""What buckets leave unused between activations, which they come and go beside: 1.1 GiB were measured (8B, where what
held 133.8 GiB while they did not held 134.9 when they did)."""
STATE_HOST_FRACTION = 0.9
"""Of host memory may be the state's, where the planner decides how much rests. For the time of a step it hardly matters
who has it; activations can be made again instead, so the largest models want it for the state."""


def fraction_before_disk(host: float, disk: float) -> float:
    """Of so much host memory, what is the state's where nobody knows yet what activations take. With a disk half, so
    that they need not go there in every micro-batch; more where that and the disk would be less than without."""
    return max(host / 2, host - disk) if disk else host


def max_offload_fraction(host_gib: float, disk_gib: float) -> float:
    """GiB of state that may rest, where the planner decides how much does."""
    return STATE_HOST_FRACTION * fraction_before_disk(host_gib, disk_gib) + disk_gib


def bucket_bytes_before_disk(host_bytes: int) -> int:
    """Of a bucket, where some rest on disk: the buffers in between are part of ``host_bytes`` of host memory."""
    return disk_buffer_bytes(host_bytes, BUCKET_BYTES)


@dataclass(frozen=True)
class Split:
    """GiB of state that rests and of activations that are swapped, in host memory and on disk; and of buffers."""

    state_in_host: float
    moved_in_host: float
    buffers: float
    state_on_disk: float
    moved_on_disk: float


def split_before_disk(offloaded_gib: float, host_gib: float, moved_gib: float) -> Split:
    """Where a disk takes what host memory has no room for.

    Args:
        offloaded_gib: of state, which comes first; half of the room is its at least.
        host_gib: of host memory; may be infinite.
        moved_gib: of activations at their peak.
    """
    host_bytes = int(min(host_gib * GIB, 16 * BUCKET_BYTES))  # more makes no larger buckets
    bucket_bytes = bucket_bytes_before_disk(host_bytes)
    spill_bytes = min(bucket_bytes, MAX_SPILL_BUFFER_BYTES)
    buffers_gib = NUM_STAGED * (bucket_bytes * (offloaded_gib > 0) + spill_bytes * (moved_gib > 0)) / GIB
    room_gib = max(0.0, host_gib - buffers_gib)
    state_gib = min(offloaded_gib, max(room_gib - moved_gib, room_gib / 2))
    in_host_gib = min(moved_gib, room_gib - state_gib)
    return Split(state_gib, in_host_gib, buffers_gib, offloaded_gib - state_gib, moved_gib - in_host_gib)


@dataclass(frozen=True)
class States:
    """How a run keeps them.

    Attributes:
        gradient_bytes: of one parameter's: in fp32, or in bf16 where the optimizer takes that.
        state_bytes: of one parameter's main value and two moments, all in fp32; TransformerEngine's precision-aware
            optimizer keeps of the main value only what the bf16 weight lacks.
        shards: ranks that share the state.
        offload_fraction: part of the state that is offloaded to host memory (``--swap-optimizer``).
        auto: that is the most; the planner decides how much is offloaded.
        weight_bytes: of one parameter: in bf16, or in fp32, where the weights are the main values.
    """

    gradient_bytes: int = 4
    state_bytes: int = 12
    shards: int = 1
    offload_fraction: float = 0.0
    auto: bool = False
    weight_bytes: int = 2

    @property
    def param_bytes(self) -> int:
        """Of one parameter, in all places together; of the state a rank's share alone is fewer."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes

    def weights_gib(self, num_params: float) -> float:
        """Of so many parameters on a rank."""
        return num_params * self.weight_bytes / GIB

    def gradients_gib(self, num_params: float) -> float:
        return num_params * self.gradient_bytes / GIB

    def state_gib(self, num_params: float) -> float:
        """On the device and in host memory together."""
        return num_params * self.state_bytes / self.shards / GIB

    def host_gib(self, num_params: float) -> float:
        """What rests, a part on disk included."""
        return self.offload_fraction * self.state_gib(num_params)

    def device_gib(self, num_params: float) -> float:
        """Weights, gradients, and the state that does not rest."""
        stays = self.state_gib(num_params) - self.host_gib(num_params)
        return self.weights_gib(num_params) + self.gradients_gib(num_params) + stays

    def swap_ms(self, num_params: float, link_both_gb_s: float) -> float:
        """What rests once in and once out, both directions of the link at the same time."""
        return self.host_gib(num_params) * GIB / (link_both_gb_s * 1e6)

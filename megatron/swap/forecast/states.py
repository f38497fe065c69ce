"""Memory of weights, gradients and optimizer state on each tier. It does not depend on activations."""

from dataclasses import dataclass

from megatron.swap.common.disk_buffers import MAX_SPILL_BUFFER_BYTES, disk_buffer_bytes, staging_bytes
from megatron.swap.common.types import GIB
from megatron.swap.planner.profile import BUCKET_BYTES, BUCKETS_GIB

# To write and read offloaded state at 1.2 and 2.2 GB/s: a local disk with direct access.
DISK_MS_PER_GIB = GIB / 1e6 * (1 / 1.2 + 1 / 2.2)
TYPE_BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "uint8": 1, "fp8": 1}
"""Bytes of a value, by the words of training flags and by the types that Megatron makes of them."""
STATE_HOST_FRACTION = 0.9
"""Most of host memory for optimizer state, if the planner decides how much is offloaded. Activations can be recomputed
instead, so that the largest models need host memory for their state."""


def type_bytes(given: object) -> int:
    """Return the bytes of a value: of a type as a flag names it, or as torch does (``torch.bfloat16``)."""
    return TYPE_BYTES[str(given).removeprefix("torch.")]


def max_state_before_disk(host: float, disk: float) -> float:
    """Return how much of ``host`` memory optimizer state may take. ``disk``: 0 if there is none."""
    # The size of activations is not known yet. Half is left to them, so that they need not use the disk in every
    # micro-batch, unless half and disk hold too little.
    return max(host / 2, host - disk) if disk else host


def max_offloaded_state_gib(host_gib: float, disk_gib: float) -> float:
    """Return the GiB of optimizer state that may be offloaded, if the planner decides how much is."""
    return STATE_HOST_FRACTION * max_state_before_disk(host_gib, disk_gib) + disk_gib


def bucket_bytes_before_disk(host_bytes: int) -> int:
    """Return the size of a bucket if state is on disk, whose buffers are part of ``host_bytes`` of host memory."""
    return disk_buffer_bytes(host_bytes, BUCKET_BYTES)


@dataclass(frozen=True)
class Split:
    """GiB of offloaded optimizer state, offloaded activations and disk buffers, in host memory and on disk."""

    state_in_host: float
    activations_in_host: float
    buffers: float
    state_on_disk: float
    activations_on_disk: float


def split_before_disk(offloaded_gib: float, host_gib: float, activations_gib: float) -> Split:
    """Divide offloaded state and activations between host memory, which may be infinite, and a disk."""
    host_bytes = int(min(host_gib * GIB, 16 * BUCKET_BYTES))  # more host memory does not make larger buckets
    bucket_bytes = bucket_bytes_before_disk(host_bytes)
    spill_bytes = min(bucket_bytes, MAX_SPILL_BUFFER_BYTES)
    of_state, of_activations = staging_bytes(bucket_bytes), staging_bytes(spill_bytes)
    buffers_gib = (of_state * (offloaded_gib > 0) + of_activations * (activations_gib > 0)) / GIB
    room_gib = max(0.0, host_gib - buffers_gib)
    # State gets at least half of the host memory, if it needs that much.
    state_gib = min(offloaded_gib, max(room_gib - activations_gib, room_gib / 2))
    in_host_gib = min(activations_gib, room_gib - state_gib)
    return Split(state_gib, in_host_gib, buffers_gib, offloaded_gib - state_gib, activations_gib - in_host_gib)


@dataclass(frozen=True)
class States:
    gradient_bytes: int = 4  # of a gradient: 4 in fp32, or 2 in bf16 if the optimizer accepts that
    state_bytes: int = 12
    """Bytes of a parameter's fp32 main value and two moments. TransformerEngine's precision-aware optimizer stores only
    the 16 bits of the main value that the bf16 weight lacks."""
    num_shards: int = 1  # number of ranks that share the state
    offload_fraction: float = 0.0  # fraction of the state that is offloaded to host memory (``--swap-optimizer``)
    is_auto: bool = False  # the planner decides how much is offloaded, at most ``offload_fraction``
    weight_bytes: int = 2  # bytes of one weight: 2 in bf16, or 4 in fp32, where weights are the main values
    has_fp8_weights: bool = False  # linear layers in FP8 have no weights in bf16 (``--fp8-param-gather``)
    fp8_bytes: float = 0.0  # bytes that FP8 adds to the average weight of a rank; below 0 if it saves some
    copied_gradient_bytes: int = 0  # of the copy that Megatron makes for its step (``_copy_model_grads_to_main_grads``)
    num_fp8_moments: int = 0  # moments of a parameter that are in 8 bits
    transpose_bytes: int = 0  # of the moments' transposes, which ``--swap-optimizer`` drops (``optimizer/wrapped.py``)

    @property
    def param_bytes(self) -> int:
        """Bytes of a parameter with gradient and state on all tiers and ranks together."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes

    def weights_gib(self, num_params: float) -> float:
        return num_params * (self.weight_bytes + self.fp8_bytes) / GIB

    def gradients_gib(self, num_params: float) -> float:
        return num_params * self.gradient_bytes / GIB

    def optimizer_gib(self, num_params: float) -> float:
        """Return the GiB of the optimizer's step besides ``device_gib``, once no activations are held."""
        copies_gib = num_params * self.copied_gradient_bytes / self.num_shards / GIB
        return copies_gib + (BUCKETS_GIB if self.offload_fraction else 0.0)

    def state_gib(self, num_params: float) -> float:
        return num_params * self.state_bytes / self.num_shards / GIB

    def offloaded_gib(self, num_params: float) -> float:
        return self.offload_fraction * self.state_gib(num_params)

    def device_gib(self, num_params: float) -> float:
        """Return the GiB of weights, gradients and the state that is not offloaded."""
        return self.weights_gib(num_params) + self.gradients_gib(num_params) + self.kept_gib(num_params)

    def kept_gib(self, num_params: float) -> float:
        transposes_gib = 0.0 if self.offload_fraction else num_params * self.transpose_bytes / self.num_shards / GIB
        return self.state_gib(num_params) - self.offloaded_gib(num_params) + transposes_gib

    def copy_ms(self, num_params: float, link_both_gb_s: float) -> float:
        """Return the ms to reload and offload the offloaded state once, in both directions at the same time."""
        return self.offloaded_gib(num_params) * GIB / (link_both_gb_s * 1e6)

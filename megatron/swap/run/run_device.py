"""The device of this rank, and its memory in use."""

import functools
from collections.abc import Sequence

import torch
from torch import nn

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB, UsageError
from megatron.swap.devices.base import Device
from megatron.swap.devices.cuda import CudaDevice
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.memory.host_memory import memory_gib_of
from megatron.swap.profiling.observer import Observer
from megatron.swap.reporting.summary import CountedStep

# Steps that are counted under each plan. Two refusals of a site change the offloads, so the third step is like all
# later.
NUM_COUNTED = 3


class RunDevice:
    """The rank's device, and the observer that counts the bytes held by autograd.

    ``has_verdict`` counts the first steps under each plan, for the lines at the end of a run. Without ``torch_device``
    it is the current GPU, or the CPU if there is none.
    """

    def __init__(
        self, settings: Settings, rank: int, ranges: Ranges, *, has_verdict: bool = False,
        torch_device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._rank = rank  # each rank has other random delays of emulated copies
        self.ranges = ranges  # names the engine's work for a profiler
        if torch_device is None:
            torch_device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.torch_device = torch_device
        counts = settings.summary is not None or (settings.auto and torch_device.type == "cpu")
        says_verdict = has_verdict and settings.acts and settings.log_level != "quiet"
        # None if its figures are not needed.
        self.observer = Observer(is_always_on=counts) if counts or says_verdict else None
        self.counted: CountedStep | None = None  # the last step that was counted under the present plan
        self._num_left = NUM_COUNTED
        if self.observer is not None and not settings.auto:
            self.observer.count_steps(NUM_COUNTED)

    def step_ended(self, iteration: int, *, is_settled: bool) -> None:
        """End a step. ``is_settled``: the next step follows the same plan, which was chosen for good."""
        if self.observer is None:
            return
        peaks = self.observer.end_step()
        if not is_settled:  # counting takes time, so steps are not counted while plans are compared
            self.counted, self._num_left = None, NUM_COUNTED
            return
        if peaks is not None and self._num_left:
            self.counted = CountedStep(iteration, peaks.held_bytes, peaks.saved_bytes)
            self._num_left -= 1
        self.observer.count_steps(self._num_left)

    @functools.cached_property
    def device(self) -> Device:
        # Made at the first use: Megatron chooses this rank's device and starts CUDA only when it initializes.
        if self.torch_device.type == "cuda":
            with torch.cuda.device(self.torch_device):
                return CudaDevice()
        return EmulatedDevice(self._settings.cpu_delay_ms / 1e3, self._rank, self.ranges, self._settings.cpu_memory_gib)

    @property
    def memory_gib(self) -> float:
        """Memory of the GPU in GiB, or of this host, which emulates it."""
        return memory_gib_of(self.torch_device, self._settings.cpu_memory_gib)

    def check_room(self, chunks: Sequence[nn.Module]) -> None:
        """Raise a ``UsageError`` if the emulated device has no room for the gradients of the model's ``chunks``."""
        given_gib = self._settings.cpu_memory_gib
        params = [param for chunk in chunks for param in chunk.parameters() if param.requires_grad]
        gradient_bytes = sum(param.numel() * param.element_size() for param in params)
        if given_gib is not None and given_gib * GIB <= gradient_bytes:
            raise UsageError(
                f"--swap-cpu-memory-gib {given_gib:g}: must be more than the {gradient_bytes / GIB:.2g} GiB that the "
                "gradients of this model take; activations and optimizer state come on top. Raise it, or leave it out."
            )

    @property
    def is_made(self) -> bool:
        return "device" in vars(self)

    def allocated_bytes(self) -> int | None:
        """Return the device memory in use in bytes; on the emulated device autograd's bytes, if they are counted."""
        num_bytes = self.device.allocated_bytes() if self.is_made else None
        if num_bytes is None and self.observer is not None:
            return self.observer.live_bytes
        return num_bytes

    def take_peak(self, unseen_bytes: int = 0) -> tuple[int, int]:
        """Return the most bytes in use since the last call, and now, with ``unseen_bytes`` on the emulated device."""
        peak = self.device.take_peak() if self.is_made else None
        if peak is None and self.observer is not None:
            peak_bytes, now_bytes = self.observer.take_peak()
            peak = peak_bytes + unseen_bytes, now_bytes + unseen_bytes
        return peak or (0, 0)

"""Copies of optimizer state beside layers: loads while the last backward frees memory, offloads while forward fills it.

Between a backward and the next forward the device holds hardly any activations. Their memory has room for optimizer
state, whose copies then run beside compute.

The rule at each boundary of a layer: state may hold the highest use of memory at any boundary of the step before, minus
what others hold now. So the peak does not rise, and all state is offloaded when the first forward ends. What Megatron
allocates between backward and step counts as held by others. The rule depends on the order of allocations, not on time.
"""

from __future__ import annotations

from megatron.swap.devices.base import Device
from megatron.swap.optimizer.stepper import OptimizerStepper
from megatron.swap.optimizer.transfers import StateTransfers


class StepOverlap:
    """Decides at each boundary of a layer how much optimizer state may be on the device.

    Args:
        device: whose memory counts. Where RAM plays the device and use of memory has no meaning, one bucket is loaded
            or released at each boundary.
        transfers: of all optimizers.

    Attributes:
        is_enabled: while it is false, copies run inside the optimizer's step alone.
    """

    def __init__(self, device: Device, transfers: StateTransfers) -> None:
        self._device = device
        self._transfers = transfers
        self._steppers: list[OptimizerStepper] = []
        self._level_bytes: int | None = None  # highest use at a boundary of the last step; None: not known
        self._highest_bytes = 0  # the same of the current step
        self._backward_end_bytes = 0  # in use by others at the last boundary of backward
        self._extra_bytes = 0  # most that others allocated on top of that before the last step ended
        self._has_layers = self._is_stepping = False
        self.is_enabled = True

    def add(self, stepper: OptimizerStepper) -> None:
        """Let ``stepper`` load ahead, behind those that were added before: optimizers step in this order."""
        self._steppers.append(stepper)

    def measure_room(self) -> int:
        """Measure what others hold; return the bytes left for state while an optimizer steps (0 in the first step)."""
        others_bytes = self._others_bytes()
        if others_bytes is None:
            return 2 * self._transfers.bucket_bytes if self._has_layers and self.is_enabled else 0
        self._extra_bytes = max(self._extra_bytes if self._is_stepping else 0, others_bytes - self._backward_end_bytes)
        self._is_stepping = True
        return self._room_beside(others_bytes) if self.is_enabled else 0

    def on_layer_forward(self, is_first_micro_batch: bool) -> None:
        """Release offloaded state before the forward of a layer, in training."""
        self._has_layers = True
        if self._transfers.loaded_bytes:  # no step came after the last backward: forward and backward run again
            self._drop_loaded()
        others_bytes = self._others_bytes()
        if not is_first_micro_batch:
            self._transfers.release_offloaded()
        elif others_bytes is None:
            self._transfers.release_offloaded(max(0, self._transfers.offloading_bytes - self._transfers.bucket_bytes))
        else:
            self._transfers.release_offloaded(self._room_beside(others_bytes))
        self._highest_bytes = max(self._highest_bytes, others_bytes or 0)

    def on_layer_backward_end(self) -> None:
        """Load state after the backward of a layer, in the last micro-batch before a step."""
        self._transfers.release_offloaded()
        others_bytes = self._others_bytes()
        if others_bytes is None:
            bucket_bytes = self._transfers.bucket_bytes
            room_bytes = min(self._transfers.loaded_bytes, bucket_bytes) + 2 * bucket_bytes
        else:
            self._backward_end_bytes = others_bytes
            room_bytes = self._room_beside(others_bytes + self._extra_bytes)
        for stepper in self._steppers if self.is_enabled else ():
            stepper.load_ahead(room_bytes)
            if not stepper.is_loaded:  # the others step later, and staging buffers before the disk are few
                break

    def step_ended(self) -> None:
        """Begin a new step. Where the optimizer was not stepped, what was loaded ahead leaves room for forward."""
        self._drop_loaded()
        self._is_stepping = False
        if self._has_layers:
            self._level_bytes, self._highest_bytes = self._highest_bytes, 0

    def forget_level(self) -> None:
        """Measure one step again before anything overlaps: layers will hold another amount from now on."""
        self._level_bytes = None

    def release_offloaded(self) -> None:
        """Release the device memory of all offloaded state: what runs next is not training, and may want it."""
        self._transfers.release_offloaded()

    def _drop_loaded(self) -> None:
        for stepper in self._steppers:
            stepper.drop_loaded()

    def _room_beside(self, others_bytes: int) -> int:
        return 0 if self._level_bytes is None else max(0, self._level_bytes - others_bytes)

    def _others_bytes(self) -> int | None:
        """Device bytes that are not state's."""
        allocated_bytes = self._device.allocated_bytes()
        return None if allocated_bytes is None else allocated_bytes - self._transfers.device_bytes

"""Overlap of optimizer-state copies with layers: loads in the last backward, releases in the next forward.

At each layer boundary state may use ``level - others`` bytes. ``level``: the most that everything else used at a
boundary of the last step's forwards. ``others``: the bytes that it uses now. So overlap never raises the peak, and all
state is offloaded when the first forward ends. The rule depends on the order of allocations, not on time.
"""

from __future__ import annotations

from megatron.swap.devices.base import Device
from megatron.swap.optimizer.stepper import OptimizerStepper
from megatron.swap.optimizer.transfers import StateTransfers


class StepOverlap:
    """Decides at each layer boundary how much optimizer state may be on the device."""

    def __init__(self, device: Device, transfers: StateTransfers) -> None:
        self._device = device
        self._transfers = transfers
        self._steppers: list[OptimizerStepper] = []
        self._level_bytes: int | None = None  # highest use by others in the last step's forwards; None: unknown
        self._highest_bytes = 0  # the same of the current step
        self._backward_end_bytes = 0  # in use by others at the last boundary of backward
        self._extra_bytes = 0  # most that others allocated on top of that before the last step ended
        self._has_layers = self._is_stepping = False
        self.is_enabled = True  # while false, copies run only inside the optimizer's step

    def add(self, stepper: OptimizerStepper) -> None:
        """Add a stepper. Steppers step and load in the order in which they are added."""
        self._steppers.append(stepper)

    def note_room(self) -> int:
        """Note the use by others, and return the device bytes free for state during a step: 0 in the first step."""
        others_bytes = self._others_bytes()
        if others_bytes is None:
            # An emulated device reports no memory in use, so a bucket is loaded or released at each boundary.
            return 2 * self._transfers.bucket_bytes if self._has_layers and self.is_enabled else 0
        # Memory that Megatron allocates between backward and step is use by others too.
        self._extra_bytes = max(self._extra_bytes if self._is_stepping else 0, others_bytes - self._backward_end_bytes)
        self._is_stepping = True
        return self._room_beside(others_bytes) if self.is_enabled else 0

    def on_layer_forward(self, is_first_micro_batch: bool) -> None:
        """Release offloaded state before a layer's forward in training."""
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
        """Load state after a layer's backward, in the last micro-batch before a step."""
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
            if not stepper.is_loaded:  # the others step later, and staging buffers for the disk are few
                break

    def step_ended(self) -> None:
        """End the step."""
        self._drop_loaded()
        self._is_stepping = False
        if self._has_layers:
            self._level_bytes, self._highest_bytes = self._highest_bytes, 0

    def forget_level(self) -> None:
        """Measure one step before anything overlaps, because layers will use another amount of memory."""
        self._level_bytes = None

    def release_offloaded(self) -> None:
        """Release the device memory of all offloaded state, which an evaluation may need."""
        self._transfers.release_offloaded()

    def _drop_loaded(self) -> None:
        for stepper in self._steppers:
            stepper.drop_loaded()

    def _room_beside(self, others_bytes: int) -> int:
        return 0 if self._level_bytes is None else max(0, self._level_bytes - others_bytes)

    def _others_bytes(self) -> int | None:
        """Return the device bytes in use by everything but state; None if they are not measured."""
        allocated_bytes = self._device.allocated_bytes()
        return None if allocated_bytes is None else allocated_bytes - self._transfers.device_bytes

"""Optimizer state around a step: it comes in while the last backward frees memory, and goes out while forward fills it.

Between two steps activations leave the device and come back. What they leave free in between is room for optimizer
state, which then passes through it beside compute. The rule: at the boundary of a layer state holds no more than what
is missing there to the most that was in use at any such boundary in the step before. So no peak rises, whatever a layer
takes on top (what Megatron allocates between backward and step counts too), and by the end of the first forward all is
at home. Deterministic: it goes by what is allocated, in the order of the program, not by a clock.
"""

from __future__ import annotations

from megatron.swap.devices.base import Device
from megatron.swap.state_mover import StateMover
from megatron.swap.state_swap import StateSwap


class StepOverlap:
    """Told of the boundaries of layers, tells how much state may be on the device.

    Args:
        device: whose memory it is. Where RAM plays it, and memory in use has no meaning, a bucket comes or goes at each
            boundary.
        mover: of all optimizers.
        swaps: those of the optimizers, as they are attached.
        bucket_bytes: most bytes of a bucket.

    Attributes:
        on: while it is not, copies run within the optimizer's step alone.
    """

    def __init__(self, device: Device, mover: StateMover, swaps: list[StateSwap], bucket_bytes: int) -> None:
        self._device = device
        self._mover = mover
        self._swaps = swaps
        self._bucket_bytes = bucket_bytes
        self._level_bytes: int | None = None
        self._most_bytes = self._done_bytes = 0
        self._extra_bytes = 0  # most that others took in the last step beside what they held when backward was done
        self._is_watching = self._is_stepping = False
        self.on = True

    def room_in_step(self) -> int:
        """State may hold so much now, while the optimizer steps; 0 before a step has told."""
        others_bytes = self._others_bytes()
        if others_bytes is None:
            return 2 * self._bucket_bytes if self._is_watching and self.on else 0
        self._extra_bytes = max(self._extra_bytes if self._is_stepping else 0, others_bytes - self._done_bytes)
        self._is_stepping = True
        return self._room_beside(others_bytes) if self.on else 0

    def layer_begins(self, is_first_micro_batch: bool) -> None:
        """The forward of a layer, in training."""
        self._is_watching = True
        if self._mover.loaded_bytes:  # no step came: this is done again
            self._forget_loaded()
        others_bytes = self._others_bytes()
        if not is_first_micro_batch:
            self._mover.release()
        elif others_bytes is None:
            self._mover.release(max(0, self._mover.going_bytes - self._bucket_bytes))
        else:
            self._mover.release(self._room_beside(others_bytes))
        self._most_bytes = max(self._most_bytes, others_bytes or 0)

    def layer_is_done(self) -> None:
        """The last backward of a layer before a step."""
        self._mover.release()
        others_bytes = self._others_bytes()
        if others_bytes is None:
            room_bytes = min(self._mover.loaded_bytes, self._bucket_bytes) + 2 * self._bucket_bytes
        else:
            self._done_bytes = others_bytes
            room_bytes = self._room_beside(others_bytes + self._extra_bytes)
        for swap in self._swaps if self.on else ():
            swap.load_ahead(room_bytes)
            if not swap.is_loaded:  # the others are stepped later, and buffers before the disk are few
                break

    def step_ended(self) -> None:
        """Also where the optimizer was not stepped: then what came in leaves room for forward."""
        self._forget_loaded()
        self._is_stepping = False
        if self._is_watching:
            self._level_bytes, self._most_bytes = self._most_bytes, 0

    def forget(self) -> None:
        """Layers will hold another amount from now on: a step has to tell again."""
        self._level_bytes = None

    def _forget_loaded(self) -> None:
        for swap in self._swaps:
            swap.forget()

    def drain(self) -> None:
        """Something else runs next, and may want the memory."""
        self._mover.release()

    def _room_beside(self, others_bytes: int) -> int:
        return 0 if self._level_bytes is None else max(0, self._level_bytes - others_bytes)

    def _others_bytes(self) -> int | None:
        allocated_bytes = self._device.allocated_bytes()
        return None if allocated_bytes is None else allocated_bytes - self._mover.held_bytes

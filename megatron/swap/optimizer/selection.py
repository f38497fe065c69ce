"""Choice of the parameters whose optimizer state is offloaded: a fraction of all bytes, spread over the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.swap.optimizer.param_state import ParamState

ROUNDING = 1e-9  # relative tolerance, so that a fraction of 1 admits all parameters in spite of rounding


class StateSelection:
    """Chooses parameters while they are created one by one, and again when the planner changes the fraction."""

    def __init__(self, fraction: float, min_bytes: int) -> None:
        self.fraction = fraction  # as given, or less after ``limit``
        # All bytes are bytes of parameters, to which the bytes of state are proportional. Smaller parameters stay.
        self._min_bytes = max(1, min_bytes)
        self.seen_bytes = self.offloaded_bytes = 0

    @property
    def offloaded_fraction(self) -> float:
        """Chosen fraction of all bytes, 0 to 1."""
        return self.offloaded_bytes / max(1, self.seen_bytes)

    def limit(self, fraction: float) -> None:
        self.fraction = min(self.fraction, fraction)

    def see(self, param: torch.Tensor) -> bool:
        """Count a new parameter, and return whether it is chosen."""
        # So the chosen bytes are close to the fraction of the bytes seen so far, anywhere in the model.
        self.seen_bytes += param.nbytes
        return self.choose(param)

    def choose(self, param: torch.Tensor) -> bool:
        """Choose ``param``, which was seen, if it fits into the fraction now. Return whether it fits."""
        offloaded_bytes = self.offloaded_bytes + param.nbytes
        if param.nbytes < self._min_bytes or offloaded_bytes > self.fraction * self.seen_bytes:
            return False
        self.offloaded_bytes = offloaded_bytes
        return True

    def choose_again(self, param_states: Sequence[ParamState], fraction: float) -> set[torch.Tensor]:
        """Return those of the parameters chosen at first that are offloaded under another ``fraction`` of all bytes."""
        on_disk, in_host = ([one for one in param_states if bool(one.disk_bytes) is where] for where in (True, False))
        to_keep_bytes = max(0.0, self.offloaded_bytes - fraction * self.seen_bytes * (1 + ROUNDING))
        wanted: set[torch.Tensor] = set()
        # State on disk is kept on the device first, since its copies are the slowest.
        for group in (on_disk, in_host):
            num_bytes = sum(one.param.nbytes for one in group)
            chosen = spread([one.param for one in group], max(0.0, num_bytes - to_keep_bytes))
            chosen_bytes = sum(param.nbytes for param in chosen)
            wanted |= chosen
            to_keep_bytes = max(0.0, to_keep_bytes - (num_bytes - chosen_bytes))
        return wanted


def spread(params: Sequence[torch.Tensor], max_bytes: float) -> set[torch.Tensor]:
    """Return parameters of at most ``max_bytes``, chosen as evenly as sizes allow, then any others that fit."""
    fraction = (1 + ROUNDING) * max_bytes / max(1, sum(param.nbytes for param in params))
    chosen: set[torch.Tensor] = set()
    chosen_bytes = seen_bytes = 0
    for is_even in (True, False):
        for param in params:
            seen_bytes += param.nbytes if is_even else 0
            if param not in chosen and chosen_bytes + param.nbytes <= fraction * seen_bytes:
                chosen_bytes += param.nbytes
                chosen.add(param)
    return chosen

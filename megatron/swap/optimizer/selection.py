"""Chooses the parameters whose optimizer state is offloaded: a fraction of all bytes, spread evenly over the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.swap.optimizer.param_state import ParamState

ROUNDING = 1e-9
"""Relative tolerance, so that all parameters fit into the sum of their own fractions."""


class StateSelection:
    """Chooses while parameters are created one by one, and again when the planner changes the fraction.

    All bytes are those of parameters: their state is proportional.

    Args:
        fraction: of all bytes that is to be offloaded, 0 to 1.
        min_bytes: smaller parameters are kept on the device.

    Attributes:
        fraction: lowered by ``limit``.
        seen_bytes, offloaded_bytes: of all parameters so far, and of those chosen.
    """

    def __init__(self, fraction: float, min_bytes: int) -> None:
        self.fraction = fraction
        self._min_bytes = max(1, min_bytes)
        self.seen_bytes = self.offloaded_bytes = 0

    @property
    def offloaded_fraction(self) -> float:
        """Fraction of all bytes that was chosen, 0 to 1."""
        return self.offloaded_bytes / max(1, self.seen_bytes)

    def limit(self, fraction: float) -> None:
        """Choose no more than ``fraction`` from now on."""
        self.fraction = min(self.fraction, fraction)

    def see(self, param: torch.Tensor) -> bool:
        """Count a parameter that was not seen before, and return whether it is chosen.

        At every moment what is chosen is close to the fraction of what was seen, whatever is still to come.
        """
        self.seen_bytes += param.nbytes
        return self.choose(param)

    def choose(self, param: torch.Tensor) -> bool:
        """Return whether ``param``, which was seen and not chosen, fits into the fraction now; then it is chosen."""
        offloaded_bytes = self.offloaded_bytes + param.nbytes
        if param.nbytes < self._min_bytes or offloaded_bytes > self.fraction * self.seen_bytes:
            return False
        self.offloaded_bytes = offloaded_bytes
        return True

    def choose_again(self, param_states: Sequence[ParamState], fraction: float) -> set[torch.Tensor]:
        """Return the parameters to offload, of those chosen at first, for another fraction.

        Args:
            param_states: of all parameters that were chosen at first.
            fraction: of all bytes, those that were never chosen included. State on disk is the first to be kept; among
                the rest the choice is as even as at first.
        """
        on_disk, in_host = ([one for one in param_states if bool(one.disk_bytes) is where] for where in (True, False))
        to_keep_bytes = max(0.0, self.offloaded_bytes - fraction * self.seen_bytes * (1 + ROUNDING))
        wanted: set[torch.Tensor] = set()
        for group in (on_disk, in_host):
            num_bytes = sum(one.param.nbytes for one in group)
            chosen = spread([one.param for one in group], max(0.0, num_bytes - to_keep_bytes))
            chosen_bytes = sum(param.nbytes for param in chosen)
            wanted |= chosen
            to_keep_bytes = max(0.0, to_keep_bytes - (num_bytes - chosen_bytes))
        return wanted


def spread(params: Sequence[torch.Tensor], max_bytes: float) -> set[torch.Tensor]:
    """Choose parameters of at most ``max_bytes``, as evenly among ``params`` as sizes allow, then whatever still
    fits."""
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

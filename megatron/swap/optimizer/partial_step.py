"""Calls of an optimizer's own step with some of its parameters, or with slices of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.swap.common.types import UsageError
from megatron.swap.optimizer.param_state import has_shape_of

Settings = dict[str, Any]  # a parameter group without its parameters: learning rate, counters of steps and others
Table = dict[torch.Tensor, Any]  # entries by parameter that an optimizer keeps beside its ``state``


class PartialStep:
    """Calls the optimizer's own step with other parameters in its groups. Construct it before the step is replaced."""

    def __init__(self, optimizer: torch.optim.Optimizer, tables: Sequence[Table] = ()) -> None:
        self._optimizer = optimizer
        self._tables = tables
        self._step = optimizer.step
        self._group_of: dict[torch.Tensor, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            # Each call would advance settings in tensors.
            tensors = [name for name, value in group.items() if isinstance(value, torch.Tensor)]
            if tensors:
                raise UsageError(
                    f"--swap-optimizer: the optimizer keeps {', '.join(tensors)} in tensors (CUDA graphs?), and would "
                    "advance them once per bucket. Leave --optimizer-cuda-graph out."
                )
            self._group_of.update((param, number) for param in group["params"])

    def group_of(self, param: torch.Tensor) -> int:
        return self._group_of[param]

    def __call__(self, params: Sequence[list[torch.Tensor]]) -> list[Settings]:
        """Step ``params``, a list per group, and return each group's settings after the step."""
        groups = self._optimizer.param_groups
        # Groups without parameters take part: TransformerEngine keeps the step counter in the group, and advances it.
        self._optimizer.param_groups = [{**group, "params": mine} for group, mine in zip(groups, params, strict=True)]
        try:
            self._step()
            return [
                {name: value for name, value in group.items() if name != "params"}
                for group in self._optimizer.param_groups
            ]
        finally:
            # The optimizer's own groups do not change.
            self._optimizer.param_groups = groups

    def probe_state(self, param: torch.Tensor) -> dict[str, torch.dtype]:
        """Return names and dtypes of the state that the optimizer keeps per element of a parameter like ``param``."""
        # The types are known only from a step, here of two elements.
        probe = torch.zeros(2, dtype=param.dtype, device=param.device)
        probe.grad = probe.decoupled_grad = torch.zeros_like(probe)  # type: ignore[attr-defined]
        group = self._group_of[param]
        self([[probe] if number == group else [] for number in range(len(self._optimizer.param_groups))])
        state = self._optimizer.state.pop(probe, {})
        for table in self._tables:
            if (entry := table.pop(probe, None)) is not None:
                table.setdefault(param, entry)  # as the first step would begin
        return {name: value.dtype for name, value in state.items() if has_shape_of(value, probe)}

    def entries_of(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in the entries of ``whole`` in the tables."""
        return [value for table in self._tables for value in table.get(whole, {}).values()]

    def lend(self, whole: torch.Tensor, param: torch.Tensor) -> None:
        """Give ``param``, a slice of ``whole`` or all of it, the entries of ``whole`` in the tables."""
        for table in self._tables:
            if whole in table:
                table[param] = table[whole]

    def take_back(self, whole: torch.Tensor, param: torch.Tensor) -> dict[str, Any]:
        """Remove ``param`` and return its state. Its entries in the tables become those of ``whole``."""
        for table in self._tables:
            if (entry := table.pop(param, None)) is not None:
                table[whole] = entry
        return self._optimizer.state.pop(param, {})  # type: ignore[no-any-return]

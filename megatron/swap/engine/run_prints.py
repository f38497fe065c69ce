"""Fingerprints of the tensors that a run of a layer computes, in their order."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron.swap.devices.plain_tensors import is_plain
from megatron.swap.engine.checksum import fingerprint, parts_of, sums

LEAST_TOLERANCE = 2.0**-13  # of fp32: a sum may be rounded in each of thousands of additions
SEED_BYTES = 16


class Prints:
    """Fingerprints of tensors, in their order: of those numbered in ``wanted``, or of all.

    ``is_exact``: of all bytes. ``is_loose``: of values, for a comparison within a tolerance. ``has_workspaces``: saved
    bytes may be a workspace, which does not count. ``unwatched``: as in ``Contexts``.
    """

    def __init__(
        self, wanted: Collection[int] | None, unwatched: Callable[[], AbstractContextManager[Any]], *,
        is_exact: bool, is_loose: bool, has_workspaces: bool = True,
    ) -> None:  # fmt: skip
        self.kinds: list[tuple[torch.Size, tuple[int, ...], torch.dtype]] = []  # shape, strides, dtype
        self._has_workspaces = has_workspaces
        self.is_exact, self.is_loose = is_exact, is_loose
        self._wanted = wanted
        self._unwatched = unwatched
        self._exact: dict[torch.device, list[torch.Tensor]] = {}
        self._loose: list[tuple[torch.Tensor, float]] = []  # sums of values, and the tolerance of their dtype

    def add(self, tensor: torch.Tensor) -> None:
        """Take the next tensor."""
        number = len(self.kinds)
        self.kinds.append((tensor.shape, tensor.stride() if is_plain(tensor) else (), tensor.dtype))
        if number not in self._wanted if self._wanted is not None else self._is_left_out(tensor):
            return
        with self._unwatched(), torch.no_grad():
            for part in parts_of(tensor):
                if self.is_exact:
                    self._exact.setdefault(part.device, []).append(fingerprint(part))
                if self.is_loose and part.is_floating_point():
                    self._loose.append((sums(part), tolerance_of(part.dtype)))

    def _is_left_out(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a weight, or may be a seed or workspace with bytes that kernels leave unset."""
        owner = tensor if tensor._base is None else tensor._base
        is_small = not tensor.is_floating_point() and tensor.nbytes <= SEED_BYTES
        is_workspace = self._has_workspaces and tensor.dtype is torch.uint8
        return type(owner) is torch.nn.Parameter or is_small or is_workspace

    def differ(self, other: Prints) -> torch.Tensor | None:
        """Return whether any byte differs (0-D bool), or None if there are no fingerprints. The kinds must be equal."""
        return _any(
            (_joined(mine) != _joined(other._exact[device])).any() for device, mine in self._exact.items()
        )

    def are_far(self, other: Prints) -> torch.Tensor | None:
        """Return whether values differ by more than the tolerance, as ``differ``."""
        others = [sums.nan_to_num() for sums, _ in other._loose]
        return _any(
            ~((one.nan_to_num() - another).norm() <= tolerance * another.norm())
            for (one, tolerance), another in zip(self._loose, others, strict=True)
        )


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)  # most runs compare one tensor: a kernel less


def _any(flags: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return whether any of ``flags``, some of which may be on the CPU, is true. None if there are none."""
    found = list(flags)
    return functools.reduce(operator.or_, found) if found else None


def tolerance_of(dtype: torch.dtype) -> float:
    """Return by how much the sums of values may differ, relative to their norm, where kernels are not deterministic."""
    return max(4 * torch.finfo(dtype).eps, LEAST_TOLERANCE)

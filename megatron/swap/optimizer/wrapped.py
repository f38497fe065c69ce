"""Entries of an optimizer's state that are objects around a tensor.

TransformerEngine's Adam keeps 8-bit moments in such objects: the values (``_data``), their scale, and the quantizer.
Only the values are offloaded. Scales are single numbers, and stay on the device.
"""

from __future__ import annotations

from typing import Any

import torch


def stored(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the values of ``value``: itself, or the tensor inside."""
    inner = getattr(value, "_data", None)
    return inner if isinstance(inner, torch.Tensor) else value


def scales_of(wrapper: Any) -> list[torch.Tensor]:
    """Return the scales of an object's values."""
    return [wrapper._scale_inv, wrapper._quantizer.scale]


def drop_caches(value: Any) -> None:
    """Drop the transpose of an object's values, and make no more of them."""
    # On Hopper a transpose serves matrix products, which no optimizer needs.
    value.update_usage(rowwise_usage=True, columnwise_usage=False)
    value._quantizer.set_usage(columnwise=False)

"""The scales of 8-bit layers, and the histories that they come from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def fp8_scales(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield scales and amax histories of TransformerEngine's layers in ``model``. Most recipes keep none of them."""
    for module in model.modules():
        meta = getattr(module, "fp8_meta", {})
        for state in (meta.get("scaling_fwd"), meta.get("scaling_bwd")):
            found = (getattr(state, name, None) for name in ("scale", "amax_history"))
            yield from (value for value in found if isinstance(value, torch.Tensor))

"""The scales of 8-bit layers, and the histories that they come from."""

from collections.abc import Iterator

import torch
from torch import nn


def fp8_scales(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield scales and amax histories of TransformerEngine's layers in ``model``; only delayed scaling keeps any."""
    for module in model.modules():
        meta = getattr(module, "fp8_meta", {})
        for key in ("scaling_fwd", "scaling_bwd"):
            for name in ("scale", "amax_history"):
                value = getattr(meta.get(key), name, None)
                if isinstance(value, torch.Tensor):
                    yield value

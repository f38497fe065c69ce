"""When a rank loads its offloaded optimizer state."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from megatron.swap.megatron_lm.optimizer_swap import OptimizerSwap


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_state_is_loaded_behind_layers_of_the_last_micro_batch(num_micro_batches: int) -> None:
    swap = OptimizerSwap.__new__(OptimizerSwap)
    swap._has_backward, swap._num_forwards, swap._num_micro_batches = True, {}, lambda: num_micro_batches
    swap._overlap = Mock()
    swap._overlap.on_layer_backward_end.return_value = None
    layer, seen = nn.Identity().train(), []
    for _ in range(num_micro_batches):
        hidden = torch.ones(2, requires_grad=True)
        swap._before_layer(layer, (hidden,), {})
        (hidden * 2).sum().backward()
        seen.append(swap._overlap.on_layer_backward_end.call_count)
    assert seen == [*(num_micro_batches - 1) * [0], 1]

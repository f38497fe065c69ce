"""Agreement of ranks on the figures of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.swap.autotune.consensus import Ranks
from megatron.swap.autotune.workload import Step


@pytest.mark.parametrize("ms", [30.0, None])
def test_of_each_figure_the_worst_counts(ms: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has more in every second figure. A time that one rank lacks stays unknown."""
    others = torch.tensor([20.0, 9.0, 3.0, 900.0, 2.0, 0.5], dtype=torch.float64)

    def all_reduce(mine: torch.Tensor, how: Any, group: Any) -> None:
        assert how == torch.distributed.ReduceOp.MAX
        mine.copy_(mine.maximum(others))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    ranks = Ranks()
    ranks.num_ranks = 2
    assert ranks.worst(Step(7, ms, 8.0, 4.0, 800.0, 3, 0.0)) == Step(7, ms, 9.0, 4.0, 900.0, 3, 0.5)

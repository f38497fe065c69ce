"""A swapped model is not copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.common.types import UsageError
from tests.plain_loop import mlps

SWAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "layers": lambda model: swap.activations(model, "0-1"),
    "budget": lambda model: swap.activations(model, memory_gib=1.0),
    "weights": lambda model: swap.weights(model.eval()),
}


@pytest.mark.parametrize("how", SWAPPED)
def test_a_swapped_model_is_neither_copied_nor_pickled(how: str) -> None:
    model = mlps()
    copies: tuple[Callable[[Any], object], ...] = copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel
    with SWAPPED[how](model) as swapped:
        for given in model, model[0], nn.Sequential(model), swapped:
            for copied in copies[: 3 if isinstance(given, nn.Module) else 2]:
                with pytest.raises(UsageError, match="neither copied nor pickled"):
                    copied(given)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    for copied in copies:
        copied(model)

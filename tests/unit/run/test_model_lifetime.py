"""A swapped model is not copied. One that is deleted without ``close`` is freed, with all that it held."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.common.types import UsageError
from megatron.swap.memory.host_memory import HostRegion
from tests.plain_loop import mlps, rows, train
from tests.planned_loop import NUM_STEPS, QUIET, fraction_gib

SWAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "layers": lambda model: swap.activations(model, "0-1", min_mib=0.0),
    "budget": lambda model: swap.activations(model, memory_gib=fraction_gib(model, 0.4), **QUIET),
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


@pytest.mark.parametrize("how", SWAPPED)
def test_a_model_that_is_deleted_without_close_is_freed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook. PyTorch's hook on all optimizers, threads and host memory hold nothing."""
    before, regions = set(threading.enumerate()), list[weakref.ref[HostRegion]]()
    make = HostRegion.__init__

    def made(region: HostRegion, *arguments: Any, **options: Any) -> None:
        regions.append(weakref.ref(region))
        make(region, *arguments, **options)

    monkeypatch.setattr(HostRegion, "__init__", made)
    model = mlps()
    swapped = SWAPPED[how](model)
    if how == "weights":
        with torch.no_grad():
            model(rows(0))
    else:
        train(model, num_steps=NUM_STEPS if how == "budget" else 2)
    held = [weakref.ref(one) for one in (model, swapped, *model.parameters())]
    threads = set(threading.enumerate()) - before
    assert threads
    assert regions
    del model, swapped
    gc.collect()
    assert [reference() for reference in (*held, *regions) if reference() is not None] == []
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()

"""The hook for slime, against a fake of what slime 0.4.0 has in these files:

``slime/backends/megatron_utils/model.py`` (``train_one_step`` calls the hook after it has zeroed the gradients),
``slime/utils/misc.py`` (``load_function`` looks the hook up by its path before each step).
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from megatron.swap.common.types import UsageError


def train(hook: Callable[..., None], args: Namespace, model: list[Any]) -> None:
    """Two rollouts of two steps each."""
    for rollout_id in range(2):
        for step_id in range(2):
            hook(args, rollout_id, step_id, model, "optimizer", "scheduler")


def test_a_process_installs_once(adapter: Callable[..., Any], chunks: list[Any]) -> None:
    slime = adapter("slime")
    hook = slime.module.before_train_step(memory_gib=60)
    train(hook, Namespace(reset_optimizer_states=False), chunks)
    (swapped,) = slime.installed
    assert (swapped.model, swapped.optimizer, swapped.settings) == (chunks, "optimizer", {"memory_gib": 60})
    assert swapped.num_steps == 0, "a call would count the time of the rollout as the step's"
    assert not swapped.is_closed


def test_state_that_slime_resets_is_not_offloaded(adapter: Callable[..., Any], chunks: list[Any]) -> None:
    slime = adapter("slime")
    args = Namespace(reset_optimizer_states=True)
    with pytest.raises(UsageError, match="--reset-optimizer-states"):
        train(slime.module.before_train_step(layers="all", config={"optimizer": "auto"}), args, chunks)
    assert slime.installed == []
    train(slime.module.before_train_step(layers="all"), args, chunks)
    assert len(slime.installed) == 1

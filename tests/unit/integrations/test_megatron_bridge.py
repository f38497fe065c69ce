"""The callback for Megatron-Bridge, against a fake of what megatron-bridge 0.6.2 has in these files:

``megatron/bridge/training/callbacks.py`` (``Callback``, ``CallbackContext``, ``CallbackManager.add``),
``megatron/bridge/training/train.py`` (when ``train`` fires which event).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.swap.common.types import UsageError

EVENTS = ("on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end", "on_eval_start", "on_eval_end")


Callback: Any = type("Callback", (), dict.fromkeys(EVENTS, lambda self, context: None))
"""Bridge's base class: a method for each event, which does nothing."""


def state_with(log_params_norm: bool = False, async_save: bool = False) -> Any:
    """Return Bridge's global state, whose config has these options."""
    logger, checkpoint = SimpleNamespace(log_params_norm=log_params_norm), SimpleNamespace(async_save=async_save)
    return SimpleNamespace(cfg=SimpleNamespace(logger=logger, checkpoint=checkpoint))


def train(
    model: list[Any], optimizer: Any, callback: Any, skipped: tuple[bool, ...] = (), state: Any = None
) -> None:
    """Fire the events of a run in Bridge's order. Like Bridge, call only methods that the callback overrides."""
    state = state_with() if state is None else state

    def fire(event: str, **of_event: Any) -> None:
        if getattr(type(callback), event) is not getattr(Callback, event):
            getattr(callback, event)(SimpleNamespace(state=state, model=model, **of_event))

    fire("on_train_start", optimizer=optimizer)
    for skipped_iter in skipped:
        fire("on_train_step_start", optimizer=optimizer)
        fire("on_train_step_end", optimizer=optimizer, loss_dict={}, grad_norm=1.0, skipped_iter=skipped_iter)
        fire("on_eval_start")
        fire("on_eval_end", total_loss_dict={})
    fire("on_train_end", optimizer=optimizer)


@pytest.fixture
def bridge(adapter: Callable[..., Any]) -> Any:
    names = {"Callback": Callback, "CallbackContext": SimpleNamespace}
    return adapter("megatron_bridge", {"megatron.bridge.training.callbacks": names})


def test_a_run_is_swapped_from_its_start_to_its_end(bridge: Any, chunks: list[Any]) -> None:
    callback = bridge.module.SwapCallback(memory_gib=60)
    assert callback.swapped is None
    train(chunks, "optimizer", callback, skipped=(False, True, False))
    (swapped,) = bridge.installed
    assert swapped is callback.swapped
    assert (swapped.model, swapped.optimizer, swapped.settings) == (chunks, "optimizer", {"memory_gib": 60})
    assert swapped.num_steps == 3
    assert swapped.is_closed


@pytest.mark.parametrize("option", ["log_params_norm", "async_save"])
def test_what_reads_offloaded_state_is_refused(bridge: Any, chunks: list[Any], option: str) -> None:
    state = state_with(**{option: True})
    with pytest.raises(UsageError, match=f"{option}, which moves, reads or resets optimizer state"):
        train(chunks, "optimizer", bridge.module.SwapCallback(memory_gib=60, config={"optimizer": 1}), state=state)
    train(chunks, "optimizer", bridge.module.SwapCallback(memory_gib=60), state=state)
    assert len(bridge.installed) == 1

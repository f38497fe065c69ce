"""The callback for ms-swift, against a fake of what ms-swift 4.6.0 has in these files:

``swift/megatron/callbacks/base.py`` and ``mapping.py`` (``MegatronCallback``, ``megatron_callbacks_map``),
``swift/megatron/trainers/base.py`` (``BaseMegatronTrainer``: makes the callbacks last, calls their events).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.swap.common.types import UsageError


class MegatronCallback:
    """ms-swift's base class."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.args = trainer.args
        self.state = trainer.state

    def nothing(self) -> None: ...

    on_train_begin = on_train_end = on_step_begin = on_step_end = nothing


class Trainer:
    """A trainer of ms-swift: model and optimizer are there before its callbacks."""

    def __init__(self, args: Any, known: dict[str, Any], chunks: list[Any]) -> None:
        self.args = args
        self.wrapped_models = chunks
        self.optimizer = "optimizer"
        self.state = SimpleNamespace(iteration=0)
        self.callbacks = [known[name](self) for name in args.callbacks]

    def train(self) -> None:
        steps = ["on_step_begin", "on_step_end"] * self.args.train_iters
        for event in ("on_train_begin", *steps, "on_train_end"):
            for callback in self.callbacks:
                getattr(callback, event)()


def arguments(**more: Any) -> Any:
    return SimpleNamespace(callbacks=["swap", "print"], train_iters=3, **{"async_save": False, **more})


@pytest.fixture
def known() -> dict[str, Any]:
    return {"print": MegatronCallback}


@pytest.fixture
def swift(adapter: Callable[..., Any], known: dict[str, Any]) -> Any:
    names = {"MegatronCallback": MegatronCallback, "megatron_callbacks_map": known}
    return adapter("ms_swift", {"swift.megatron.callbacks": names})


def test_a_run_is_swapped_from_its_start_to_its_end(swift: Any, known: dict[str, Any], chunks: list[Any]) -> None:
    swift.module.register(layers="0-9", config={"min_mib": 0.1})
    trainer = Trainer(arguments(), known, chunks)
    assert swift.installed == [], "nothing is installed before training"
    trainer.train()
    (swapped,) = swift.installed
    assert (swapped.model, swapped.optimizer) == (chunks, "optimizer")
    assert swapped.settings == {"layers": "0-9", "config": {"min_mib": 0.1}}
    assert swapped.num_steps == 3
    assert swapped.is_closed


def test_optimizer_state_has_one_offloader(swift: Any, known: dict[str, Any], chunks: list[Any]) -> None:
    swift.module.register(memory_gib=60, config={"optimizer": 0.5})
    with pytest.raises(UsageError, match="--offload_optimizer"):
        Trainer(arguments(offload_optimizer=True), known, chunks).train()
    with pytest.raises(UsageError, match="--async_save"):
        Trainer(arguments(async_save=True), known, chunks).train()
    assert swift.installed == []
    Trainer(arguments(offload_optimizer=False), known, chunks).train()
    swift.module.register(memory_gib=60)
    Trainer(arguments(offload_optimizer=True), known, chunks).train()
    assert len(swift.installed) == 2

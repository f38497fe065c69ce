"""The engines for verl, against a fake of what verl 0.9.1 has in these files:

``verl/workers/engine/base.py`` (``EngineRegistry``, ``BaseEngine.train_batch`` and ``infer_batch``),
``verl/workers/engine/megatron/transformer_impl.py`` (``MegatronEngine``, with and without a value head),
``verl/workers/engine_workers.py`` (``TrainingWorker`` makes its engine by the registry, ``reset`` initializes it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron.swap.common.types import UsageError

Key = str | tuple[str, str]


class EngineRegistry:
    """verl's registry; each test has a subclass, with engines of its own."""

    engines: dict[tuple[str, str], dict[Key, type]]

    @classmethod
    def register(
        cls, model_type: str, backend: str, device: str = "cuda", vendor: str | None = None
    ) -> Callable[[type], type]:
        def add(engine: type) -> type:
            of_kind = cls.engines.setdefault((model_type, backend), {})
            key: Key = device if vendor is None else (device, vendor)
            assert key not in of_kind
            of_kind[key] = engine
            return engine

        return add

    @classmethod
    def new(cls, model_type: str, backend: str, device: str, vendor: str, **options: Any) -> Any:
        of_kind = cls.engines[model_type, backend]
        engine = of_kind.get((device, vendor)) or of_kind[device]
        return engine(**options)


class MegatronEngineWithLMHead:
    """A Megatron engine of verl: builds its model when it is initialized."""

    def __init__(self, forward_only: bool = False, offloads_optimizer: bool = False) -> None:
        self.is_optimizer_offload_enabled = offloads_optimizer
        self._forward_only = forward_only

    def initialize(self) -> None:
        self.module = [object()]
        self.optimizer = None if self._forward_only else object()

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        return {"forward_only": forward_only}

    def optimizer_step(self) -> float:
        return 1.5

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        output = self.forward_backward_batch(data, loss_function, forward_only=False)
        return output | {"grad_norm": self.optimizer_step()}

    def infer_batch(self, data: Any, loss_function: Any = None) -> Any:
        return self.forward_backward_batch(data, loss_function, forward_only=True)


class MegatronEngineWithValueHead(MegatronEngineWithLMHead):
    """A critic's engine."""


@pytest.fixture
def registry() -> type[EngineRegistry]:
    class OfTest(EngineRegistry):
        """A registry that is empty."""

    OfTest.engines = {}
    OfTest.register(model_type="language_model", backend="megatron")(MegatronEngineWithLMHead)
    OfTest.register(model_type="value_model", backend="megatron")(MegatronEngineWithValueHead)
    return OfTest


@pytest.fixture
def verl(adapter: Callable[..., Any], registry: type[EngineRegistry]) -> Any:
    engines = {
        "MegatronEngineWithLMHead": MegatronEngineWithLMHead,
        "MegatronEngineWithValueHead": MegatronEngineWithValueHead,
    }
    names = {"verl.workers.engine": {"EngineRegistry": registry}, "verl.workers.engine.megatron": engines}
    return adapter("verl", names)


def engine_of(registry: type[EngineRegistry], model_type: str = "language_model", **options: Any) -> Any:
    engine = registry.new(model_type, "megatron", "cuda", "nvidia", **options)
    engine.initialize()
    return engine


def test_a_trained_model_is_swapped(verl: Any, registry: type[EngineRegistry]) -> None:
    verl.module.register(memory_gib=60)
    engine = engine_of(registry)
    assert engine.infer_batch("data") == {"forward_only": True}
    assert verl.installed == [], "verl may have its weights in host memory until it trains"
    for _ in range(3):
        assert engine.train_batch("data", "loss") == {"forward_only": False, "grad_norm": 1.5}
        engine.infer_batch("data")
    (swapped,) = verl.installed
    assert (swapped.model, swapped.optimizer, swapped.settings) == (engine.module, engine.optimizer, {"memory_gib": 60})
    assert swapped.num_steps == 3


def test_a_reset_worker_swaps_its_new_model(verl: Any, registry: type[EngineRegistry]) -> None:
    verl.module.register(layers="all")
    engine = engine_of(registry)
    engine.train_batch("data", "loss")
    engine.initialize()
    engine.train_batch("data", "loss")
    first, second = verl.installed
    assert (first.is_closed, second.is_closed) == (True, False)
    assert second.model is engine.module


def test_a_reference_model_is_left_alone(verl: Any, registry: type[EngineRegistry]) -> None:
    verl.module.register(layers="all")
    engine_of(registry, forward_only=True).infer_batch("data")
    assert verl.installed == []


def test_a_critic_has_its_own_engine(verl: Any, registry: type[EngineRegistry]) -> None:
    verl.module.register(layers="all")
    critic = engine_of(registry, "value_model")
    assert isinstance(critic, MegatronEngineWithValueHead)
    critic.train_batch("data", "loss")
    assert verl.installed[0].model is critic.module


def test_other_devices_keep_verls_engines(verl: Any, registry: type[EngineRegistry]) -> None:
    verl.module.register(layers="all")
    assert type(registry.new("language_model", "megatron", "cuda", "metax")) is MegatronEngineWithLMHead


def test_optimizer_state_has_one_offloader(verl: Any, registry: type[EngineRegistry]) -> None:
    verl.module.register(memory_gib=60, config={"optimizer": 0.5})
    with pytest.raises(UsageError, match=r"megatron\.optimizer_offload"):
        engine_of(registry, offloads_optimizer=True).train_batch("data", "loss")
    engine_of(registry).train_batch("data", "loss")
    assert len(verl.installed) == 1

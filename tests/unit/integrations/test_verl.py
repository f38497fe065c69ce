"""The engines for verl, against a fake of what verl 0.9.1 has in these files:

``verl/workers/engine/base.py`` (``EngineRegistry``, ``BaseEngine.train_batch`` and ``infer_batch``),
``verl/workers/engine/megatron/transformer_impl.py`` (``MegatronEngine``, with and without a value head),
``verl/workers/engine_workers.py`` (``TrainingWorker`` makes its engine by the registry, ``reset`` initializes it).
"""

from collections.abc import Callable
from typing import Any

import pytest

from megatron.swap.common.types import UsageError


class EngineRegistry:
    """verl's registry, which prefers a vendor's engine to the engine of all CUDA devices."""

    def __init__(self) -> None:
        self.engines: dict[tuple[str, str, str, str | None], type] = {}

    def register(
        self, model_type: str, backend: str, device: str = "cuda", vendor: str | None = None
    ) -> Callable[[type], type]:
        return lambda engine: self.engines.setdefault((model_type, backend, device, vendor), engine)

    def new(self, model_type: str = "language_model", **options: Any) -> Any:
        """Return an engine with its model on a device of NVIDIA."""
        engine = self.engines[model_type, "megatron", "cuda", "nvidia"](**options)
        engine.initialize()
        return engine


class MegatronEngine:
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


@pytest.fixture
def registry() -> EngineRegistry:
    return EngineRegistry()


@pytest.fixture
def verl(adapter: Callable[..., Any], registry: EngineRegistry) -> Any:
    engines = dict.fromkeys(("MegatronEngineWithLMHead", "MegatronEngineWithValueHead"), MegatronEngine)
    names = {"verl.workers.engine": {"EngineRegistry": registry}, "verl.workers.engine.megatron": engines}
    return adapter("verl", names)


@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
def test_a_trained_model_is_swapped(verl: Any, registry: EngineRegistry, model_type: str) -> None:
    verl.module.register(memory_gib=60)
    engine = registry.new(model_type)
    assert engine.infer_batch("data") == {"forward_only": True}
    assert verl.installed == [], "verl may have its weights in host memory until it trains"
    for _ in range(3):
        assert engine.train_batch("data", "loss") == {"forward_only": False, "grad_norm": 1.5}
        engine.infer_batch("data")
    (swapped,) = verl.installed
    assert (swapped.model, swapped.optimizer, swapped.settings) == (engine.module, engine.optimizer, {"memory_gib": 60})
    assert swapped.num_steps == 3
    engine.initialize()  # the worker is reset
    engine.train_batch("data", "loss")
    assert swapped.is_closed
    assert verl.installed[1].model is engine.module


def test_optimizer_state_has_one_offloader(verl: Any, registry: EngineRegistry) -> None:
    verl.module.register(memory_gib=60, config={"optimizer": 0.5})
    registry.new(forward_only=True, offloads_optimizer=True).infer_batch("data")
    with pytest.raises(UsageError, match=r"megatron\.optimizer_offload"):
        registry.new(offloads_optimizer=True).train_batch("data", "loss")
    registry.new().train_batch("data", "loss")
    assert len(verl.installed) == 1

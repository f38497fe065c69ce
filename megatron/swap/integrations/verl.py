"""verl: engines of its registry, in place of its Megatron engines."""

from __future__ import annotations

from typing import Any

from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from megatron.swap.integrations.two_offloaders import refuse_two_offloaders
from megatron.swap.run.install import install
from megatron.swap.run.run import Run


def register(**settings: Any) -> None:
    """Let verl's ``megatron`` backend swap on NVIDIA GPUs. Call it once, in a module that ``external_lib`` names.

    ``settings``: the arguments of ``swap.install`` but the model and the optimizer.
    """
    engines = {"language_model": MegatronEngineWithLMHead, "value_model": MegatronEngineWithValueHead}
    for model_type, engine in engines.items():
        # verl prefers a vendor's engine to the engine of all CUDA devices. Its own engines have no vendor.
        registered = EngineRegistry.register(model_type=model_type, backend="megatron", device="cuda", vendor="nvidia")
        registered(swapping(engine, settings))


def swapping(engine: type, settings: dict[str, Any]) -> type:
    """Return a subclass of a Megatron ``engine`` of verl whose model swaps from its first training step on."""

    class SwappingEngine(engine):  # type: ignore[misc, valid-type]
        swapped: Run | None = None

        def initialize(self) -> None:
            if self.swapped is not None:  # verl resets a worker by a second call
                self.swapped.close()
                self.swapped = None
            super().initialize()

        def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
            if not forward_only and self.swapped is None:  # now verl has its offloaded weights on the GPU
                refuse_two_offloaders(settings, "megatron.optimizer_offload", self.is_optimizer_offload_enabled)
                self.swapped = install(self.module, self.optimizer, **settings)
            return super().forward_backward_batch(data, loss_function, forward_only)

        def optimizer_step(self) -> Any:
            grad_norm = super().optimizer_step()
            if self.swapped is not None:
                self.swapped.step()
            return grad_norm

    return SwappingEngine

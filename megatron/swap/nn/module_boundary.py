"""The boundary around a layer of any PyTorch model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from megatron.swap.common.spelling import ACTIVATIONS
from megatron.swap.common.types import UsageError
from megatron.swap.engine.function_transforms import innermost
from megatron.swap.engine.layer_hooks import LayerBoundary, in_backward
from megatron.swap.operators.kinds import tensors_in
from megatron.swap.profiling.saved_tensor_hooks import are_hooks_off, innermost_hooks, is_of_checkpoint


class ModuleBoundary(LayerBoundary):
    """The boundary of a layer of any PyTorch model. ``torch.compile`` leaves the layer uncompiled.

    A layer that calls itself is one layer: the calls within a call have no boundary.

    Attributes:
        autocast_cache: whether autocast keeps its casts of weights while the layer runs, in forward and where it runs
            again in backward. If not, a cast is one of the tensors that the layer saves.
        has_run_unhooked: it has run where autograd calls no hooks, so that nothing was swapped.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_running = False
        self.autocast_cache = True
        self.has_run_unhooked = False
        self._own_forward = self._inner
        self._inner = self._run_own

    def _run_own(self, *args: Any, **kwargs: Any) -> Any:
        self._is_running = True
        try:
            if self.autocast_cache:
                return self._own_forward(*args, **kwargs)
            with _uncached():
                return self._own_forward(*args, **kwargs)
        finally:
            self._is_running = False

    @torch.compiler.disable
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_running:
            return self._own_forward(*args, **kwargs)
        if are_hooks_off():
            self.has_run_unhooked |= torch.is_grad_enabled()
            return self._own_forward(*args, **kwargs)
        return self._run_bounded(*args, **kwargs)

    @ACTIVATIONS.errors()
    def _run_bounded(self, *args: Any, **kwargs: Any) -> Any:
        # The boundary's hooks would hide the layer from the checkpoint, which would save all and recompute nothing.
        if in_checkpoint():
            if self._position.swapped:
                self._refuse_checkpoint()
            return self._inner(*args, **kwargs)
        if in_backward() and torch.is_grad_enabled() and self._position.swapped:
            self._refuse_checkpoint()
        # Count the finished waits here: without calls of ``stats`` their events would pile up.
        self._manager.counters.wait_ms()
        return super()._forward(*args, **kwargs)

    def _mark(self, result: Any, on_backward: Callable[[], None]) -> Any:
        # Return the same tensors, in their structure: a caller may change them in place.
        for tensor in tensors_in(result):
            if (node := innermost(tensor).grad_fn) is not None:
                node.register_prehook(lambda _: on_backward())
        return result

    def _refuse_checkpoint(self) -> NoReturn:
        raise UsageError(
            f"layer {self.layer} ({type(self.module).__name__}) is to be swapped, but runs inside an activation "
            "checkpoint, so it saves no tensors. Switch checkpointing off for it "
            "(Hugging Face: model.gradient_checkpointing_disable()) or swap other layers."
        )


@contextmanager
def _uncached() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def in_checkpoint() -> bool:
    """Whether this forward runs inside a ``torch.utils.checkpoint`` with ``use_reentrant=False``."""
    hooks = innermost_hooks()
    return hooks is not None and is_of_checkpoint(hooks)

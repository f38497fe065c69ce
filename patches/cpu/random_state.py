"""On the CPU there is one random state: what upstream calls the CUDA state is the CPU's.

Megatron keeps named random states (one for what tensor-parallel ranks draw differently, one for experts …)
and swaps them in and out of the *CUDA* generator. Dropout on the CPU draws from the CPU generator, so without
these patches the named states would never be drawn from: losses change, tensor-parallel ranks draw alike,
recomputed dropout differs from the first pass, and nothing says so. That is why every access is patched, none
left to chance.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from patches.registry import Patch

_TORCH = "torch 2.11.0"
_MEGATRON = "megatron-core 0.19.2"


def _manual_seed(original: Callable[..., Any]) -> Callable[..., None]:
    def manual_seed(seed: int) -> None:
        # Not torch.manual_seed, which seeds "all CUDA devices" in turn.
        torch.default_generator.manual_seed(int(seed))

    return manual_seed


def _get_rng_state(original: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    return get_rng_state


def _set_rng_state(original: Callable[..., Any]) -> Callable[..., None]:
    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        torch.set_rng_state(new_state)

    return set_rng_state


def _set_cuda_rng_state(original: Callable[..., Any]) -> Callable[..., None]:
    def set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    return set_cuda_rng_state


def _fork(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    @functools.wraps(original)
    def fork(self: Any, *arguments: Any, **options: Any) -> Iterator[None]:
        # Upstream warns when the CPU's state moves inside, once for every dropout: here it is meant to.
        logger = logging.getLogger("megatron.core.tensor_parallel.random")
        forked = original(self, *arguments, **options)
        forked.__enter__()
        try:
            yield
        finally:
            was_disabled, logger.disabled = logger.disabled, True
            try:
                forked.__exit__(None, None, None)
            finally:
                logger.disabled = was_disabled

    return fork


PATCHES = (
    Patch("torch.cuda", "manual_seed", _manual_seed, "seeds a named state", _TORCH),
    Patch(
        "torch.cuda",
        "get_rng_state",
        _get_rng_state,
        "reads the state to name it, checkpoint it, replay it",
        _TORCH,
    ),
    Patch(
        "torch.cuda",
        "set_rng_state",
        _set_rng_state,
        "restores the state of a checkpoint or a replay",
        _TORCH,
    ),
    # Upstream reaches this one through the submodule, a lookup of its own.
    Patch(
        "torch.cuda.random",
        "get_rng_state",
        _get_rng_state,
        "reads the state on entering a named one",
        _TORCH,
    ),
    Patch(
        module="megatron.core.tensor_parallel.random",
        attribute="_set_cuda_rng_state",
        build=_set_cuda_rng_state,
        reason="without CUDA the original only queues the call for later: states would silently never be set",
        written_for=_MEGATRON,
        source_sha256="b179c9d95438b61c1d9b58e8e13cc6534f2ae2f870d991c42438de53829ed398",
    ),
    Patch(
        module="megatron.core.tensor_parallel.random",
        attribute="CudaRNGStatesTracker.fork",
        build=_fork,
        reason="warns at every dropout that the CPU's state has moved, which is right here",
        written_for=_MEGATRON,
        source_sha256="6821e1e397253d43b111f5cb8f7feab6301faacf24deaece01416a7c644322d5",
    ),
)

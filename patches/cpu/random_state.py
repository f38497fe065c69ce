"""Redirect every access to the CUDA random state to the CPU's.

Megatron keeps named random states (such as one for draws that differ between tensor-parallel ranks) and loads them into
the *CUDA* generator in turn. Dropout on the CPU draws from the CPU generator, so nothing would draw from the named
states: tensor-parallel ranks would draw alike, and recomputed dropout would differ, without any error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.swap.patches.registry import Patch

_TORCH = {"torch 2.11.0": None}


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
        # Upstream warns at every dropout that the CPU's state has moved inside, as it should here.
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
    Patch("torch.cuda", "manual_seed", _manual_seed, "it seeds a named random state", _TORCH),
    Patch("torch.cuda", "get_rng_state", _get_rng_state, "it reads the state to name, checkpoint or replay it", _TORCH),
    Patch("torch.cuda", "set_rng_state", _set_rng_state, "it restores the state of a checkpoint or a replay", _TORCH),
    # Upstream calls this one through the submodule, which is another lookup.
    Patch(
        "torch.cuda.random", "get_rng_state", _get_rng_state, "it reads the state when a named one is entered", _TORCH
    ),
    Patch(
        module="megatron.core.tensor_parallel.random",
        attribute="_set_cuda_rng_state",
        build=_set_cuda_rng_state,
        reason="without CUDA the original queues the call for later, so states are silently never set",
        sources={"megatron-core 0.18.2": "b179c9d95438b61c1d9b58e8e13cc6534f2ae2f870d991c42438de53829ed398"},
    ),
    Patch(
        module="megatron.core.tensor_parallel.random",
        attribute="CudaRNGStatesTracker.fork",
        build=_fork,
        reason="warns at every dropout that the CPU's state has moved, as it should without CUDA",
        sources={"megatron-core 0.18.2": "6821e1e397253d43b111f5cb8f7feab6301faacf24deaece01416a7c644322d5"},
    ),
)
